"""How long a step must take: the time to compare a measured one with, and what none can beat."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a microbatch costs along the line of stages; all times in seconds."""

    num_microbatches: int
    forward_s: Sequence[float]
    """One a stage."""
    backward_s: Sequence[float]
    latency_s: Sequence[float]
    """One way, one a boundary between stages."""
    transfer_s: Sequence[float]
    """The boundary's tensor at the link's rate, one a boundary; the same in both directions."""

    def __post_init__(self) -> None:
        assert self.num_microbatches >= 1 and self.forward_s
        assert len(self.backward_s) == len(self.forward_s)
        assert len(self.latency_s) == len(self.transfer_s) == len(self.forward_s) - 1
        every = (*self.forward_s, *self.backward_s, *self.latency_s, *self.transfer_s)
        assert all(time >= 0 for time in every)

    @property
    def stage_s(self) -> list[float]:
        """Forward and backward of one microbatch, one a stage."""
        return [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]

    @property
    def slowest_s(self) -> float:
        """The slowest stage's forward and backward: a microbatch's share of a full pipeline."""
        return max(self.stage_s)

    @property
    def link_s(self) -> float:
        """What the slowest boundary takes for a step's tensors, one way: no step is below that."""
        return self.num_microbatches * max(self.transfer_s, default=0.0)


def ideal_step_s(costs: Costs) -> float:
    """T_ideal: a step whose windows hide the latency, so that each link is paid for once.

    (M - 1) c + sum of (f + b) over stages + 2 sum of (L + x) over boundaries, c the slowest
    stage's f + b. Exact for equal stages; with unequal ones a step may be a little quicker. It
    holds where no transfer takes longer than c: else the link sets the pace, not the stages.
    """
    filling_s = (costs.num_microbatches - 1) * costs.slowest_s
    links_s = sum(costs.latency_s) + sum(costs.transfer_s)
    return filling_s + sum(costs.stage_s) + 2 * links_s


def lower_bound_s(costs: Costs) -> float:
    """What no synchronous step goes below, whatever its schedule.

    For each stage: the first microbatch has to reach it, it has to compute all of them, and its
    vote has to travel back before the first stage may commit.
    """
    bounds, reach_s = [], 0.0
    for stage, both_s in enumerate(costs.stage_s):
        bounds.append(reach_s + costs.num_microbatches * both_s)
        if stage < len(costs.latency_s):
            reach_s += costs.forward_s[stage]
            reach_s += 2 * costs.latency_s[stage] + costs.transfer_s[stage]
    return max(bounds)
