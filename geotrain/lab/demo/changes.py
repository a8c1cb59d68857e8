"""What just changed in a run, and why: the links' settings, links that went, the plan. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from geotrain.lab.settings import describe_settings

_KEPT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that changed."""

    at_s: float
    """On the machine's monotonic clock."""
    what: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.why})" if self.why else self.what


class Step(Protocol):
    """What it looks at of a step."""

    @property
    def step(self) -> int: ...
    @property
    def windows(self) -> Sequence[int]: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def committed(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def verdicts(self) -> Mapping[tuple[str, str], str]: ...
    @property
    def ended_s(self) -> float: ...


class ChangeLog:
    """Compares what it is told with what it was told before."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._changes: list[Change] = []
        self._untold = 0
        self._step: Step | None = None
        self._lanes: dict[tuple[str, str], tuple[bool, int]] = {}
        self._known_events: set[str] = set()

    @property
    def all(self) -> Sequence[Change]:
        """The last ones, oldest first."""
        return self._changes

    def take(self) -> list[Change]:
        """Those since this was last asked."""
        new = self._changes[len(self._changes) - self._untold :] if self._untold else []
        self._untold = 0
        return new

    def on_step(self, step: Step) -> None:
        before, self._step = self._step, step
        at_s = step.ended_s
        self._compare_verdicts(before.verdicts if before is not None else {}, step)
        if not step.committed:
            self._add(at_s, f"step {step.step} skipped in every region", step.reason)
        if before is None:
            return
        if list(before.windows) != list(step.windows):
            what = f"windows {_numbers(before.windows)} -> {_numbers(step.windows)}"
            self._add(at_s, f"{what} from step {step.step} on")
        if before.num_microbatches != step.num_microbatches:
            what = f"microbatches {before.num_microbatches} -> {step.num_microbatches}"
            self._add(at_s, f"{what} from step {step.step} on")

    def _compare_verdicts(self, was: Mapping[tuple[str, str], str], step: Step) -> None:
        # While one lasts, its factor may change, and a remedy may join it.
        for key, text in step.verdicts.items():
            if key not in was:
                self._add(step.ended_s, text)
        for key, text in was.items():
            if key not in step.verdicts:
                self._add(step.ended_s, f"over: {text}")

    def on_link(self, name: str, peer: str, link: Mapping[str, Any], *, now: float) -> None:
        """What a daemon says of a link; that it is made at the start is no change."""
        now_is = (link.get("state") == "connected", int(link.get("lanes_opened") or 0))
        was = self._lanes.get((name, peer))
        if was is None and not now_is[0]:
            return
        self._lanes[name, peer] = now_is
        if was is None or was == now_is:
            return
        at_s = now - float(link.get("since_s") or 0.0)
        title = f"link {name} - {peer}"
        match (was[0], now_is[0]):
            case (True, False):
                why = str(link.get("reason") or link.get("state") or "")
                self._add(at_s, f"{title} is down", why)
            case (False, True):
                self._add(at_s, f"{title} is back")
            case (True, True):  # between two looks at it
                self._add(at_s, f"{title} was lost and is back")

    def on_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """The lab's own history: what was set on the links, as `Wan.status()` has it."""
        for event in events:
            key = repr(event)
            if key not in self._known_events:
                self._known_events.add(key)
                what = f"{event['links']}: {describe_settings(event['settings'])}"
                why = event["why"] if event["why"] != "script" else ""
                self._add(event["at"], what, why)

    def _add(self, at_s: float, what: str, why: str = "") -> None:
        self._changes = [*self._changes, Change(at_s=at_s, what=what, why=why)][-_KEPT:]
        self._untold = min(self._untold + 1, len(self._changes))


def _numbers(values: Sequence[int]) -> str:
    return ",".join(str(value) for value in values)
