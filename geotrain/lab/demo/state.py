"""What is known of a running demo: what its regions told, and what their daemons say. Pure."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from geotrain.lab.demo.changes import Change, ChangeLog
from geotrain.lab.demo.options import Options
from geotrain.pipeline.trace import TracedAction, busy_s, most_in_flight

_SILENT_S = 3.0
"""Daemons ping each second, so that a link which hears nothing for longer, and two round trips,
hears no answer."""
_KEPT_STEPS = 4
"""Of each region: regions differ by one step at most, and lines may come a little late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One step as a region's training process told it; see train.py."""

    step: int
    loss: float
    num_tokens: float
    step_s: float
    num_microbatches: int
    windows: Sequence[int]
    committed: bool
    reason: str
    ended_s: float
    """On the machine's monotonic clock, as are the times of the trace."""
    attribution_s: Mapping[str, float]
    verdicts: Mapping[tuple[str, str], str]
    """What is off: its kind and where, and a line of text."""
    trace: Sequence[TracedAction]

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """KeyError, TypeError or ValueError where it is no such line."""
        return cls(
            **{name: line[name] for name in cls.__slots__ if name not in ("trace", "verdicts")},
            verdicts={(each["kind"], each["where"]): each["text"] for each in line["verdicts"]},
            trace=[
                TracedAction(kind=kind, microbatch=microbatch, begin_s=begin_s, end_s=end_s)
                for kind, microbatch, begin_s, end_s in line["trace"]
            ],
        )

    @property
    def began_s(self) -> float:
        return self.ended_s - self.step_s

    @property
    def bubble(self) -> float:
        """The share of the step in which the region ran neither a forward nor a backward."""
        return max(0.0, 1 - busy_s(self.trace) / self.step_s) if self.step_s > 0 else 0.0

    @property
    def most_in_flight(self) -> int:
        return most_in_flight(self.trace)


@dataclass(slots=True, kw_only=True)
class RegionState:
    """One region."""

    name: str
    lines: deque[StepLine] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    status: Mapping[str, Any] | None = None
    """The newest status document of its daemon; None before the first."""
    status_at: float = 0.0
    heard: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Peer -> bytes received from it, and when they were seen to grow."""
    sent_at_first_step: tuple[int, float] | None = None
    """`bytes_sent`, and when, as the first status after the first step had it."""
    forward_s: list[float] = field(default_factory=list)
    """The median of each step after the first, which also warms up."""
    backward_s: list[float] = field(default_factory=list)
    spent_s: dict[str, float] = field(default_factory=dict)
    """Where all its steps after the first went."""

    @property
    def action(self) -> str:
        """What its rank is doing, as its daemon heard; "" where nothing is known."""
        ranks = (self.status or {}).get("ranks") or [{}]
        return str(ranks[0].get("action", ""))

    def link(self, peer: str) -> Mapping[str, Any]:
        """What its daemon says of the link to a peer; empty before it says anything."""
        found: Mapping[str, Any] = (self.status or {}).get("links", {}).get(peer, {})
        return found

    @property
    def bytes_sent(self) -> int:
        """On all its links, as the newest status has it."""
        links = (self.status or {}).get("links", {})
        return sum(int(link.get("bytes_sent", 0)) for link in links.values())

    def hear(self, status: Mapping[str, Any], *, now: float, trains: bool) -> None:
        """Its daemon answered; `trains`: whether the first step is done."""
        self.status, self.status_at = status, now
        for peer, link in status.get("links", {}).items():
            received = int(link.get("bytes_received", 0))
            if peer not in self.heard or self.heard[peer][0] != received:
                self.heard[peer] = (received, now)
        if trains and self.sent_at_first_step is None:
            self.sent_at_first_step = (self.bytes_sent, now)

    def silent_s(self, peer: str) -> float:
        """For how long it had heard nothing from a peer when its daemon last answered."""
        return self.status_at - self.heard[peer][1] if peer in self.heard else 0.0

    @property
    def sent_bytes_per_s(self) -> float:
        """On all its links, the mean since the first step."""
        if self.sent_at_first_step is None:
            return 0.0
        bytes_then, then = self.sent_at_first_step
        spent_s = self.status_at - then
        return (self.bytes_sent - bytes_then) / spent_s if spent_s > 0 else 0.0

    def add(self, line: StepLine) -> None:
        self.lines.append(line)
        if line.step > 1:
            for cause, seconds in line.attribution_s.items():
                self.spent_s[cause] = self.spent_s.get(cause, 0.0) + seconds
        for kind, medians in (("F", self.forward_s), ("B", self.backward_s)):
            spent = [a.end_s - a.begin_s for a in line.trace if a.kind == kind]
            if line.step > 1 and spent:
                medians.append(statistics.median(spent))


class RunState:
    """Everything that the view and the summary show. Times are the machine's monotonic clock."""

    def __init__(self, options: Options, *, started_at: float) -> None:
        self.options = options
        self.started_at = started_at
        self.ended_at: float | None = None
        self.emulator = ""
        """Which kind emulates the links, and why not the other."""
        self.num_listening = 0
        """Daemons that listen."""
        self.first_step_at: float | None = None
        """When the first step ended, from which a script's times count."""
        self.regions = [RegionState(name=name) for name in options.names]
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.changes = ChangeLog(options.names)

    @property
    def links(self) -> list[tuple[RegionState, RegionState]]:
        """The neighbours that a link joins, the dialling one first."""
        return list(zip(self.regions, self.regions[1:], strict=False))

    @property
    def median_step_s(self) -> float:
        """Of the first region, without the first step, which also warms up allocators and links."""
        return statistics.median(self.step_s[1:] or self.step_s)

    def on_line(self, index: int, line: StepLine) -> None:
        """Region `index` has ended a step."""
        self.regions[index].add(line)
        if index == 0:
            self.first_step_at = self.first_step_at or line.ended_s
            self.losses.append(line.loss)
            self.step_s.append(line.step_s)
            self.changes.on_step(line)

    def on_status(self, index: int, status: Mapping[str, Any], *, now: float) -> None:
        """The daemon of region `index` answered."""
        region = self.regions[index]
        region.hear(status, now=now, trains=self.first_step_at is not None)
        if index + 1 < len(self.regions):
            peer = self.regions[index + 1].name
            self.changes.on_link(region.name, peer, region.link(peer), now=now)

    def silent_s(self, one: RegionState, other: RegionState) -> float | None:
        """For how long one end of their link has heard no answer; None where all is well."""
        rtt_s = (one.link(other.name).get("rtt_s") or {}).get("last") or 0.0
        silent_s = max(one.silent_s(other.name), other.silent_s(one.name))
        return silent_s if silent_s > _SILENT_S + 2 * rtt_s else None

    def stale_s(self, *, now: float) -> float | None:
        """The age of the newest step once it is more than about three steps; None until then."""
        if not self.regions[0].lines or self.ended_at is not None:
            return None
        last = self.regions[0].lines[-1]
        age_s = now - last.ended_s
        return age_s if age_s > max(2.0, 3 * last.step_s) else None

    def starting(self) -> str:
        """What is under way before the first step."""
        count = len(self.regions)
        if count == 1:
            return "a training process imports torch"
        if all((region.status or {}).get("ranks") for region in self.regions):
            return "training processes are attached, the first step is under way"
        verb = "listen" if self.num_listening == count else "start"
        return f"{count} daemons {verb}, training processes import torch"

    def since_first_step(self, change: Change) -> float:
        """Seconds; negative before it."""
        return change.at_s - (self.first_step_at or change.at_s)

    def last_whole_step(self) -> list[StepLine] | None:
        """The newest step of which every region has told, a line for each; None before the first.

        A region whose lines come late holds back this picture, and nothing else.
        """
        told = [{line.step: line for line in region.lines} for region in self.regions]
        common = set(told[0]).intersection(*told[1:])
        if not common:
            return None
        return [lines[max(common)] for lines in told]
