"""What every part of a pipeline shares: its place in the line, waiting, and errors with a place."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import nn

from geotrain.errors import RegionError
from geotrain.pipeline.edge import Edge
from geotrain.pipeline.result import StepResult
from geotrain.pipeline.segment import SegmentInfo
from geotrain.pipeline.stage import LossSpec
from geotrain.pipeline.window import FIRST_MICROBATCHES

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""After this long a wait looks around, whether or not something came."""
_DAEMON_FIRST_S = 5.0
"""A link that stays down is the daemon's to name, after the same wait; this leaves it the word."""


class Daemon(Protocol):
    """What a pipeline needs of the attachment to its daemon; absent in a run of one region."""

    @property
    def stop_reason(self) -> str | None:
        """Why the daemon asks this run to stop in order, if it does."""
        ...

    @property
    def view(self) -> int:
        """The same number in all regions, and never again in another run of them."""
        ...

    def post_action(self, text: str) -> None:
        """Publish what this rank is doing."""
        ...

    def wait(
        self, ready: Callable[[], bool], *, timeout_s: float, needs: Sequence[str] = ()
    ) -> None:
        """Wait for `ready()`. Raises RegionError when the run cannot go on.

        Args:
            needs: Regions that must not have left, even in order.
        """
        ...

    def explain(self, regions: Sequence[str]) -> str:
        """What is known of why nothing comes from these regions, or nothing."""
        ...

    def post_error(self, error: RegionError) -> None:
        """Tell every region of an error that happened here."""
        ...

    def post_report(self, result: StepResult) -> None:
        """Publish a finished step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the run this region stands, and what the run agreed on."""

    index: int
    region_names: Sequence[str]
    num_layers: Sequence[int]
    """Of each region."""
    seed: int
    global_batch: int | None
    num_microbatches: int | Literal["auto"]
    window: str | int | Sequence[int]
    in_flight_limit: int | None
    """Of this site: the most microbatches in flight, whatever the plan says."""
    in_flight_samples: int | None
    """The same in samples."""
    replay: Path | None
    """Whose plans to repeat; what the first region has counts."""
    plan_log: Path | None
    """Where the first region notes the plans."""
    default_steps: int | None
    arena_bytes: int
    """Shared with the daemon; 0 without one."""
    wait_s: float
    device: torch.device

    @property
    def name(self) -> str:
        return self.region_names[self.index]

    @property
    def first_name(self) -> str:
        return self.region_names[0]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.region_names) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a pipeline is made of."""

    segment: nn.Module
    info: SegmentInfo
    loss: LossSpec
    upstream: Edge | None
    downstream: Edge | None


class Context:
    """The surroundings in which a pipeline's parts run."""

    def __init__(self, place: Place, parts: Parts, daemon: Daemon | None) -> None:
        self.place = place
        self.parts = parts
        self._daemon = daemon
        self._place: tuple[str | None, int | None] = (None, None)
        self._posted = ""
        self._stalled_s = 0.0
        self.step: int | None = None
        """The step that the regions are at, from 1; None before the first."""
        # Before anything is known of the links: with wide windows a step is as quick as with any
        # (simulated lines: within 1 % of the best), and `Following.room` bounds their memory.
        self.window = "wide" if place.window == "auto" else place.window
        """What the next batch is announced with; in the first region only."""
        auto = place.num_microbatches == "auto"
        self.num_microbatches = FIRST_MICROBATCHES if auto else int(place.num_microbatches)
        """Into how many parts the next batch is cut; in the first region only."""

    @property
    def edges(self) -> list[Edge]:
        return [e for e in (self.parts.upstream, self.parts.downstream) if e is not None]

    # ---- what this rank is doing

    def set_action(
        self, text: str, *, key: str | None = None, microbatch: int | None = None
    ) -> None:
        """Post what this rank is doing.

        Args:
            key, microbatch: Where an error from now on is said to lie, besides the step.
        """
        self._place = (key, microbatch)
        self._post(text)

    def _post(self, text: str) -> None:
        if self._daemon is not None and text != self._posted:
            self._posted = text
            self._daemon.post_action(text)

    def wait(self, what: str, *, since: float, needs: Sequence[Edge]) -> None:
        """Wait until an edge has news, for a second at most.

        Args:
            what: What is missing, for status and errors.
            since: When the wait for it began (monotonic); bounded by liveness.wait_s.
            needs: Edges without which it will not come; their neighbours must not have left.

        Raises:
            RegionError: Another region ended the run, or the wait took too long.
        """
        assert self._daemon is not None, "one region never waits"
        self._post(f"waiting for {what}")
        began = time.monotonic()
        self._daemon.wait(
            lambda: any(edge.has_news() for edge in self.edges),
            timeout_s=_LOOK_S,
            needs=[edge.name for edge in needs],
        )
        now = time.monotonic()
        # A wait that outlasts its own limit: the process was stopped, or got no processor.
        self._stalled_s = max(self._stalled_s, now - began - _LOOK_S)
        waited_s = now - since
        if waited_s > self.place.wait_s + _DAEMON_FIRST_S:
            why = self._daemon.explain([edge.name for edge in needs])
            raise self.error(
                "lost",
                f"waited {waited_s:.0f} s for {what} (liveness.wait_s is {self.place.wait_s:g})"
                f"{f': {why}' if why else ''}",
            )

    def take_stalled_s(self) -> float:
        """For how long the process did not run at all, at most at once, since last asked."""
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        return stalled_s

    # ---- errors

    def error(self, kind: str, detail: str) -> RegionError:
        """An error in this region, at the current action."""
        key, microbatch = self._place
        return RegionError(
            region=self.place.name,
            kind=kind,
            detail=detail,
            step=self.step,
            microbatch=microbatch,
            key=key,
        )

    def daemon_error(self, detail: str) -> RegionError:
        """The loss of the daemon, by the reason that it gave before it went, if it gave one."""
        assert self._daemon is not None, "one region has no daemon to lose"
        try:
            self._daemon.wait(lambda: True, timeout_s=0.0)
        except RegionError as error:
            return error
        return self.error("daemon", detail)

    def post_error(self, error: RegionError) -> None:
        """Tell every region, also of an error from elsewhere: whoever hears first, hears it all."""
        if self._daemon is not None:
            self._daemon.post_error(error)

    # ---- figures

    @property
    def view(self) -> int:
        """Names this run among all that the regions start; a random number for one region."""
        return self._daemon.view if self._daemon is not None else secrets.randbits(63)

    def stop_requested(self) -> str:
        """Why the daemon asks to stop, or nothing."""
        return (self._daemon.stop_reason or "") if self._daemon is not None else ""

    def wire_bytes(self) -> int:
        """Bytes that this region's daemon put on the WAN for it, as acknowledged so far."""
        return sum(edge.wire_bytes for edge in self.edges)

    def report(self, result: StepResult) -> None:
        if self._daemon is not None:
            self._daemon.post_report(result)
