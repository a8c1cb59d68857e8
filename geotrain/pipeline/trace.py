"""What a region ran in a step, action by action, and what can be read from it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from geotrain.pipeline.schedule import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedAction:
    """One forward or backward of one microbatch, with its copies and coding."""

    kind: Kind
    microbatch: int
    begin_s: float
    """On the monotonic clock (`time.monotonic()`) of the machine that ran it. All processes of a
    Linux machine share it, also across containers and network namespaces, so the regions of one
    machine can be laid side by side; those of different machines cannot."""
    end_s: float
    came_s: float | None = None
    """When what it takes from a neighbour had come; None where it takes nothing."""
    input_bytes: int = 0
    """Of what a forward takes: a measure of the work in its microbatch."""


def busy_s(trace: Sequence[TracedAction]) -> float:
    """Seconds in which the region ran a forward or a backward."""
    return sum(action.end_s - action.begin_s for action in trace)


def most_in_flight(trace: Sequence[TracedAction]) -> int:
    """The most microbatches whose forward had run and whose backward was still due.

    One whose backward never comes, since nothing before the boundary trains, does not count: its
    trace does not show when the next region has taken it.
    """
    due = {action.microbatch for action in trace if action.kind == "B"}
    in_flight = most = 0
    for action in trace:
        if action.microbatch in due:
            in_flight += 1 if action.kind == "F" else -1
            most = max(most, in_flight)
    return most
