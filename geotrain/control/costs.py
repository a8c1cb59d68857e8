"""What stages and links cost, from what the regions measured."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from geotrain.control.figures import RECORD, Trip
from geotrain.pipeline.simulate import Boundary, Direction, PipelineModel, StageTimes

HIGH = 0.95
"""The quantile of the delivery times that windows are to cover: of twenty, one may come later."""
_FEW = 4
"""Fewer tensors that queued do not show how far apart they come."""
_APART = 1.5
"""By how much the times between two sendings and between their arrivals must differ to show that
the link queued them."""
_FULL = 0.9
"""Of the time between two arrivals: where the link took so much for each, it was never idle."""
_LEAST_S = 1e-6
"""A time below this is as good as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """A stage's times for one microbatch, in seconds, as measured."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @property
    def both_s(self) -> float:
        """The mean of a forward plus that of a backward."""
        return mean(self.forward_s) + mean(self.backward_s)

    @property
    def times(self) -> StageTimes:
        return StageTimes(forward_s=self.forward_s, backward_s=self.backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionCosts:
    """One direction of a boundary, in seconds."""

    latency_s: float
    """One way, for a message of no length."""
    transfer_s: float
    """What a tensor takes besides: coding, the link's rate, the copies at both ends."""
    jitter_s: tuple[float, ...] = (0.0,)
    """What each tensor took beyond that and beyond its wait for those sent before it."""
    slots: int | None = None
    """Tensors that the arenas hold."""

    @property
    def delivery_s(self) -> float:
        """What all but a few tensors stay below, once it is their turn."""
        return self.latency_s + self.transfer_s + quantile(self.jitter_s, HIGH)

    @property
    def middle_s(self) -> float:
        """What half of them stay below: a few with bad luck do not move it."""
        return self.latency_s + self.transfer_s + quantile(self.jitter_s, 0.5)

    @property
    def direction(self) -> Direction:
        return Direction(
            latency_s=self.latency_s,
            transfer_s=self.transfer_s,
            jitter_s=self.jitter_s,
            slots=self.slots,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """A boundary, both ways."""

    forward: DirectionCosts
    backward: DirectionCosts

    @property
    def both_s(self) -> float:
        """A delivery there and one back."""
        return self.forward.delivery_s + self.backward.delivery_s

    @property
    def middle_s(self) -> float:
        """The same of a tensor with neither good luck nor bad."""
        return self.forward.middle_s + self.backward.middle_s

    @property
    def busy_s(self) -> float:
        """For how long a tensor keeps the busier direction to itself."""
        return max(self.forward.transfer_s, self.backward.transfer_s)

    def without_slots(self) -> "LinkCosts":
        """The same link with arenas of any size."""
        return LinkCosts(
            forward=replace(self.forward, slots=None), backward=replace(self.backward, slots=None)
        )

    @property
    def boundary(self) -> Boundary:
        return Boundary(forward=self.forward.direction, backward=self.backward.direction)


def pipeline_model(stages: Sequence[StageCosts], links: Sequence[LinkCosts]) -> PipelineModel:
    """What a simulation takes."""
    return PipelineModel(
        stages=[stage.times for stage in stages], boundaries=[link.boundary for link in links]
    )


def round_trip_s(*directions: Sequence[Trip]) -> float | None:
    """The least that anything took there and back; None where nothing is known.

    The record that opens a step has the link to itself, and hardly any length.
    """
    ways_s = [trip.way_s for trips in directions for trip in trips]
    return min(ways_s, default=None)


def direction_costs(
    trips: Sequence[Trip], *, rtt_s: float, slots: int | None = None
) -> DirectionCosts | None:
    """One direction's costs; None where no tensor has made the trip.

    A tensor's own time on the link is taken from the quickest of them; or from how far apart they
    arrived, where they show that they queued. What each waited for the ones ahead of it follows
    from that, and is not part of a delivery: no window, however wide, makes a link faster. For the
    same reason a busy link's jitter is what each tensor took longer than the one ahead of it, and
    not how long the queue has become.

    Args:
        trips: Of tensors and records, of one step or several.
        rtt_s: The link's round trip; half of it is the way back of every trip.
    """
    tensors = sorted(trip for trip in trips if trip.microbatch != RECORD)
    if not tensors:
        return None
    queue = _Queue.of(tensors, rtt_s=rtt_s)
    transfer_s = queue.service_s
    if transfer_s is None:
        transfer_s = max(0.0, min(trip.way_s for trip in tensors) - rtt_s)
    late_s = queue.later_s if queue.is_full else _beyond_queueing_s(tensors, transfer_s, rtt_s)
    return DirectionCosts(
        latency_s=rtt_s / 2,
        transfer_s=transfer_s,
        jitter_s=tuple(max(0.0, each) for each in late_s),
        slots=slots,
    )


def _beyond_queueing_s(tensors: Sequence[Trip], transfer_s: float, rtt_s: float) -> list[float]:
    """What each took besides latency, its own time, and that of those still ahead of it."""
    found, step, free_s = [], None, 0.0
    for trip in tensors:
        if trip.step != step:
            step, free_s = trip.step, trip.sent_s
        begin_s = max(trip.sent_s, free_s)
        free_s = begin_s + transfer_s
        waited_s = begin_s - trip.sent_s
        found.append(trip.way_s - rtt_s - transfer_s - waited_s)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queue:
    """What arrivals one behind the other say of a link."""

    service_s: float | None
    """What the link took for each whose turn had come; None where that does not show."""
    is_full: bool
    """Whether most arrived as fast as the link could bring them."""
    later_s: Sequence[float]
    """What each took longer than that, once the one ahead of it had arrived."""

    @classmethod
    def of(cls, tensors: Sequence[Trip], *, rtt_s: float) -> "_Queue":
        gaps_s, served_s, alone_s = [], [], []
        for ahead, trip in itertools.pairwise(tensors):
            if ahead.step != trip.step or ahead.microbatch + 1 != trip.microbatch:
                continue
            arrived_s, ahead_s = trip.sent_s + trip.way_s, ahead.sent_s + ahead.way_s
            gap_s, sent_gap_s = arrived_s - ahead_s, trip.sent_s - ahead.sent_s
            gaps_s.append(gap_s)
            alone_s.append(arrived_s - max(ahead_s, trip.sent_s + rtt_s))
            # Had they been sent as far apart, this could as well be a delay that all share.
            is_apart = max(gap_s, sent_gap_s) > _APART * min(gap_s, sent_gap_s)
            if is_apart and ahead_s - rtt_s > trip.sent_s:
                served_s.append(max(0.0, gap_s))
        if len(served_s) < _FEW:
            return cls(service_s=None, is_full=False, later_s=())
        service_s = quantile(served_s, 0.5)
        return cls(
            service_s=service_s,
            is_full=service_s >= _FULL * quantile(gaps_s, 0.5),
            later_s=[each - service_s for each in alone_s],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A stage's time for a microbatch as a line: overhead + slope x samples."""

    overhead_s: float
    slope_s: float
    """For one sample."""

    def at(self, num_samples: float) -> float:
        return self.overhead_s + self.slope_s * num_samples


def fit_line(points: Sequence[tuple[float, float]]) -> Fit:
    """The line through (samples, seconds) with the least squares, neither part below zero.

    Errors count as shares of the seconds, since longer times vary by more.

    Where all microbatches had one size nothing tells overhead from slope: all is slope then, so
    that a prediction for other sizes errs on the side of none.
    """
    assert points
    weighed = [(n, s, 1 / max(s, _LEAST_S) ** 2) for n, s in points]
    total = sum(weight for _, _, weight in weighed)
    mean_n = sum(n * weight for n, _, weight in weighed) / total
    mean_s = sum(s * weight for _, s, weight in weighed) / total
    spread = sum(weight * (n - mean_n) ** 2 for n, _, weight in weighed)
    through_zero = Fit(overhead_s=0.0, slope_s=mean_s / mean_n if mean_n else 0.0)
    if len({n for n, _ in points}) == 1:
        return through_zero
    slope_s = sum(weight * (n - mean_n) * (s - mean_s) for n, s, weight in weighed) / spread
    if slope_s < 0:
        return Fit(overhead_s=mean_s, slope_s=0.0)
    overhead_s = mean_s - slope_s * mean_n
    return through_zero if overhead_s < 0 else Fit(overhead_s=overhead_s, slope_s=slope_s)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of the others do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]
