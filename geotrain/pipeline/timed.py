"""What a step really did, or was planned to do: its actions with their times."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from geotrain.pipeline.schedule import Action, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One action and when it ran, in seconds since the step began."""

    action: Action
    begin_s: float
    end_s: float

    def __str__(self) -> str:
        return f"{self.action} {self.begin_s:.6f} {self.end_s:.6f}"

    @classmethod
    def parse(cls, line: str) -> "Timed":
        """What prints as `line`; ValueError for anything else."""
        words = line.split()
        if len(words) != 3:
            raise ValueError(f"not an action with its times: {line!r} (expected 0F3 0.060 0.080)")
        return cls(action=Action.parse(words[0]), begin_s=float(words[1]), end_s=float(words[2]))


class Ran(Protocol):
    """What a simulated step and a real one both know of each of a stage's actions."""

    @property
    def kind(self) -> Kind: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def begin_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


def timed_runs(stage: int, runs: Iterable[Ran]) -> Iterator[Timed]:
    """One stage's actions as those of a trace."""
    for run in runs:
        action = Action(stage=stage, kind=run.kind, microbatch=run.microbatch)
        yield Timed(action=action, begin_s=run.begin_s, end_s=run.end_s)


@dataclass(frozen=True, slots=True)
class Trace:
    """The actions of one step, in the order in which they began."""

    actions: tuple[Timed, ...]

    def __str__(self) -> str:
        return "".join(f"{timed}\n" for timed in self.actions)

    @classmethod
    def of(cls, actions: Iterable[Timed]) -> "Trace":
        """Put in order: by time, then along the line."""
        return cls(tuple(sorted(actions, key=lambda timed: (timed.begin_s, timed.action.stage))))

    @classmethod
    def parse(cls, text: str) -> "Trace":
        """A trace from its printed lines; blank lines and those that begin with # are skipped.

        Raises:
            ValueError: A line that is no action with its times.
        """
        lines = (line.strip() for line in text.splitlines())
        return cls.of(Timed.parse(line) for line in lines if line and not line.startswith("#"))

    @property
    def num_stages(self) -> int:
        return 1 + max((timed.action.stage for timed in self.actions), default=-1)

    @property
    def end_s(self) -> float:
        return max((timed.end_s for timed in self.actions), default=0.0)

    def row(self, stage: int) -> list[Timed]:
        """What one stage did, in order."""
        return [timed for timed in self.actions if timed.action.stage == stage]

    def computing(self) -> "Trace":
        """Without the sending and receiving, which goes on beside the computing."""
        return Trace(tuple(timed for timed in self.actions if len(timed.action.kind) == 1))

    def rows(self) -> list[list[Action]]:
        """Every stage's actions in order, without their times."""
        return [[timed.action for timed in self.row(stage)] for stage in range(self.num_stages)]


_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}


def chrome_events(trace: Trace, names: Sequence[str]) -> dict[str, Any]:
    """The trace in the format that Perfetto and chrome://tracing open.

    Each region is a process; what it computes is one of its threads, and what it sends and
    receives are others. Times become microseconds.

    Args:
        names: The regions' names, in the order of the stages.
    """
    events: list[dict[str, Any]] = []
    for stage, name in enumerate(names):
        events.append(_named("process_name", stage, 0, f"{stage}: {name}"))
        for lane, title in enumerate(("compute", "send", "receive")):
            events.append(_named("thread_name", stage, lane, title))
    for timed in trace.actions:
        action = timed.action
        lane = 1 if action.kind.startswith("SEND") else 2 if action.kind.startswith("RECV") else 0
        events.append(
            {
                "name": str(action),
                "cat": _NAMES.get(action.kind, "link"),
                "ph": "X",
                "pid": action.stage,
                "tid": lane,
                "ts": timed.begin_s * 1e6,
                "dur": (timed.end_s - timed.begin_s) * 1e6,
                "args": {"microbatch": action.microbatch},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, stage: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": stage, "tid": lane, "args": {"name": name}}
