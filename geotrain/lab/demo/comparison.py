"""A run's step time against what it must take, what none can beat, and one process. Pure."""

import statistics
from dataclasses import dataclass

from geotrain.control.ideal import Costs, ideal_step_s, lower_bound_s
from geotrain.lab.demo.state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Seconds a step; None where it is not known."""

    step_s: float
    """As measured: the median after the first step, in the first region."""
    costs: Costs | None
    single_process_step_s: float | None
    """One plain torch process, alone on the machine: the median after its first step."""

    @property
    def ideal_s(self) -> float | None:
        return None if self.costs is None else ideal_step_s(self.costs)

    @property
    def lower_bound_s(self) -> float | None:
        return None if self.costs is None else lower_bound_s(self.costs)

    @property
    def link_is_slower(self) -> bool:
        """Whether a transfer takes longer than a microbatch: then T_ideal cannot be reached."""
        return self.costs is not None and max(self.costs.transfer_s, default=0.0) > (
            self.costs.slowest_s
        )


def compare(state: RunState, *, single_process_step_s: float | None) -> Comparison:
    """What the summary says of the step time."""
    return Comparison(
        step_s=state.median_step_s,
        costs=costs_of(state),
        single_process_step_s=single_process_step_s,
    )


def costs_of(state: RunState) -> Costs | None:
    """What a microbatch cost in this run; None where a daemon or a region has not told.

    Forward and backward are each region's medians, with its copies and its coding, as they were
    with all regions on one machine. The latency is half of the least round trip, and a transfer
    is the mean of the bytes that a microbatch put on the wire, at the rate asked for.
    """
    lines = [region.lines[-1] if region.lines else None for region in state.regions]
    first = lines[0]
    if first is None or not all(region.forward_s and region.backward_s for region in state.regions):
        return None
    num_transfers = 2 * len(state.losses) * first.num_microbatches
    latencies, transfers = [], []
    for one, other in state.links:
        there, back = one.link(other.name), other.link(one.name)
        rtt_s = (there.get("rtt_s") or {}).get("min")
        if rtt_s is None or not back:
            return None
        latencies.append(rtt_s / 2)
        wire_bytes = (there["bytes_sent"] + back["bytes_sent"]) / num_transfers
        transfers.append(wire_bytes / (state.options.mbit * 1e6 / 8))
    return Costs(
        num_microbatches=first.num_microbatches,
        forward_s=[statistics.median(region.forward_s) for region in state.regions],
        backward_s=[statistics.median(region.backward_s) for region in state.regions],
        latency_s=latencies,
        transfer_s=transfers,
    )
