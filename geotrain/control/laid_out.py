"""A real step as the simulator would have it: all regions' actions by one clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from geotrain.control.joints import Crossing, Joint
from geotrain.control.timings import Ran, Timings
from geotrain.pipeline.schedule import Compute
from geotrain.pipeline.simulate import Delivery, Run

_NEVER_S = float("-inf")
_AT_ONCE = Delivery(_NEVER_S, _NEVER_S, _NEVER_S)
"""Of what was not waited for, or not told of."""


class Ways(dict[int, Delivery]):
    """One direction of a boundary, by microbatch."""

    def __missing__(self, microbatch: int) -> Delivery:
        return _AT_ONCE


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """One step; times in seconds since the first region opened it, by that region's clock."""

    runs: Sequence[Sequence[Run]]
    forward: Sequence[Ways]
    backward: Sequence[Ways]
    opened_s: Sequence[float]
    """When each region could begin."""

    def span_s(self, stage: int) -> tuple[float, float]:
        """From there to the end of its last action: what comes after that is not known here."""
        runs = self.runs[stage]
        return self.opened_s[stage], runs[-1].end_s if runs else self.opened_s[stage]


def lay_out(timings: Sequence[Timings], joints: Sequence[Joint]) -> LaidOut:
    """Put all regions' reports of one step on one clock.

    Args:
        timings: One of each region, in order.
        joints: One a boundary.
    """
    zero_s = (timings[0].origin_us + timings[0].opened_us) / 1e6
    ahead_s, runs, opened_s = [zero_s], [], []
    for joint in joints:
        ahead_s.append(ahead_s[-1] + joint.offset_s)
    for own, own_zero_s in zip(timings, ahead_s, strict=True):
        origin_s = own.origin_us / 1e6 - own_zero_s
        opened_s.append(origin_s + own.opened_us / 1e6)
        runs.append(_runs(own, origin_s))
    return LaidOut(
        runs=runs,
        forward=[
            _ways(joint.down, joint, ahead_s[index], ahead_s[index + 1])
            for index, joint in enumerate(joints)
        ],
        backward=[
            _ways(joint.up, joint, ahead_s[index + 1], ahead_s[index])
            for index, joint in enumerate(joints)
        ],
        opened_s=opened_s,
    )


def _runs(own: Timings, origin_s: float) -> list[Run]:
    told: dict[Compute, Sequence[Ran]] = {"F": own.forward, "B": own.backward}
    runs = [
        Run(kind, ran.microbatch, origin_s + ran.begin_us / 1e6, origin_s + ran.end_us / 1e6)
        for kind, each in told.items()
        for ran in each
    ]
    return sorted(runs, key=lambda run: run.begin_s)


def _ways(
    crossed: Sequence[Crossing], joint: Joint, sender_zero_s: float, receiver_zero_s: float
) -> Ways:
    """Each tensor's way: it queued for those sent before it, left at the link's rate, travelled."""
    ways, free_s = Ways(), _NEVER_S
    for each in crossed:
        sent_s = each.sent_s - sender_zero_s
        came_s = max(sent_s, each.came_s - receiver_zero_s)
        free_s = max(sent_s, free_s) + each.size_bytes * joint.s_per_byte
        # What it took beyond that, it was late on its way; what it took less, it had not queued.
        clear_s = max(sent_s, min(free_s, came_s - joint.latency_s))
        ways[each.microbatch] = Delivery(sent_s, clear_s, came_s)
    return ways
