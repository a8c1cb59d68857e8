"""Why a stage stood still: every idle second of a step, simulated or real, by its cause."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, get_args

from geotrain.pipeline.simulate import Delivery, Run

Cause = Literal["fill", "drain", "latency", "rate", "arena", "imbalance", "window"]
"""fill: before the stage's first backward. drain: after its last forward, up to the end of the
step. In between, what the stage waited for was on its way (latency), queued for the link or
leaving (rate), held back for want of a slot (arena), or not computed yet: because another stage is
slower (imbalance), or for no such reason, so that more in flight would have helped (window)."""
CAUSES: tuple[Cause, ...] = get_args(Cause)

Segment = tuple[float, float, Cause]


class ByMicrobatch(Protocol):
    """One tensor's way for each microbatch."""

    def __getitem__(self, microbatch: int, /) -> Delivery: ...


class Stepped(Protocol):
    """What is looked at of a step; all times by one clock."""

    @property
    def runs(self) -> Sequence[Sequence[Run]]:
        """One list a stage, in order."""
        ...

    @property
    def forward(self) -> Sequence[ByMicrobatch]:
        """One a boundary: activations."""
        ...

    @property
    def backward(self) -> Sequence[ByMicrobatch]:
        """The same for gradients."""
        ...

    def span_s(self, stage: int) -> tuple[float, float]:
        """When a stage could begin, and when its step was over."""
        ...


def idle_s(step: Stepped) -> list[dict[Cause, float]]:
    """Idle seconds of each stage by cause; with its busy seconds they sum to the step's time."""
    waits = _waits(step)
    return [_causes(step, stage, waits[stage]) for stage in range(len(step.runs))]


def idle_of_s(step: Stepped, stage: int) -> dict[Cause, float]:
    """The same of one stage alone."""
    return _causes(step, stage, _waits(step)[stage])


def _busy_s(step: Stepped, stage: int) -> float:
    return sum(run.end_s - run.begin_s for run in step.runs[stage])


def _causes(step: Stepped, stage: int, segments: list[Segment]) -> dict[Cause, float]:
    runs, (begun_s, over_s) = step.runs[stage], step.span_s(stage)
    slowest_s = max(_busy_s(step, each) for each in range(len(step.runs)))
    ahead_s = slowest_s - _busy_s(step, stage)
    # Where nothing trains before a boundary, no backward ever comes.
    first_backward_s = min((run.begin_s for run in runs if run.kind == "B"), default=begun_s)
    last_forward_s = max((run.end_s for run in runs if run.kind == "F"), default=begun_s)
    causes: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    for begin_s, end_s, cause in segments:
        if end_s <= first_backward_s:
            cause = "fill"
        elif begin_s >= last_forward_s:
            cause = "drain"
        causes[cause] += end_s - begin_s
    causes["drain"] += over_s - (runs[-1].end_s if runs else begun_s)
    # The seconds by which the slowest stage takes longer no schedule can avoid: they come first,
    # out of the waits for what was not computed yet, then out of the others.
    groups: tuple[tuple[Cause, ...], ...] = (("window",), ("latency", "rate", "arena"))
    for names in groups:
        found_s = sum(causes[name] for name in names)
        taken_s = min(found_s, ahead_s - causes["imbalance"])
        for name in names:
            causes[name] *= 1 - taken_s / found_s if found_s > 0 else 1
        causes["imbalance"] += taken_s
    return causes


def _waits(step: Stepped) -> list[list[Segment]]:
    """The idle time between each stage's actions, cut into segments of one cause each.

    A wait is over when its input comes. While the neighbour had not sent it, the neighbour was
    either computing ("window" here), or itself waiting: then its reason is this stage's too.
    """
    waits: list[list[Segment]] = [[] for _ in step.runs]
    for _, begin_s, stage, index in sorted(_gaps(step)):
        run = step.runs[stage][index]
        source = _source(step, stage, index)
        if source is None:
            waits[stage].append((begin_s, run.begin_s, "arena"))
            continue
        sender, delivery = source
        if delivery.sent_s > begin_s:
            waits[stage] += _inherited(waits[sender], begin_s, min(delivery.sent_s, run.begin_s))
        # The link's rate comes last, though the tensor queued first and travelled then: where
        # tensors queue, travelling goes on meanwhile and holds up nothing.
        travelled_s = delivery.sent_s + delivery.arrived_s - delivery.clear_s
        bounds = (delivery.sent_s, travelled_s, delivery.arrived_s, run.begin_s)
        reasons: tuple[Cause, ...] = ("latency", "rate", "arena")
        for cause, first_s, last_s in zip(reasons, bounds[:-1], bounds[1:], strict=True):
            segment = (max(first_s, begin_s), min(last_s, run.begin_s), cause)
            if segment[1] > segment[0]:
                waits[stage].append(segment)
    return waits


def _gaps(step: Stepped) -> Iterator[tuple[float, float, int, int]]:
    """(end, begin, stage, index of the action after it) of every pause."""
    for stage, runs in enumerate(step.runs):
        free_s, _ = step.span_s(stage)
        for index, run in enumerate(runs):
            if run.begin_s > free_s:
                yield run.begin_s, free_s, stage, index
            free_s = run.end_s


def _source(step: Stepped, stage: int, index: int) -> tuple[int, Delivery] | None:
    """Who sent what an action takes, and its way here; None where it takes nothing."""
    run = step.runs[stage][index]
    if run.kind == "F":
        return (stage - 1, step.forward[stage - 1][run.microbatch]) if stage > 0 else None
    if stage == len(step.runs) - 1:
        return None
    return stage + 1, step.backward[stage][run.microbatch]


def _inherited(waits: list[Segment], begin_s: float, end_s: float) -> Iterator[Segment]:
    """A neighbour's waits within a time; the rest of it the neighbour was computing."""
    place = bisect.bisect_right(waits, begin_s, key=lambda segment: segment[1])
    at_s = begin_s
    for first_s, last_s, cause in waits[place:]:
        first_s, last_s = max(first_s, begin_s), min(last_s, end_s)
        if first_s >= end_s:
            break
        if first_s > at_s:
            yield at_s, first_s, "window"
        if last_s > first_s:
            yield first_s, last_s, cause
        at_s = max(at_s, last_s)
    if end_s > at_s:
        yield at_s, end_s, "window"
