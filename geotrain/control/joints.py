"""What lies between two neighbouring regions: their clocks' difference, and their link.

Nobody compares clocks. A tensor that was sent at one clock's time and came at the other's shows
the link's delay plus the clocks' difference; one that went the other way shows the delay less it.
With the least of each, and a link that is as long one way as the other, both follow. The record
that opens a step has hardly any length: it tells how much of a tensor's delay is the link's rate.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from geotrain.control.timings import Ran, Timings

_RECORDS = 3
"""Steps over whose openings a median is taken: one of them may have had bad luck."""


class Crossing(NamedTuple):
    """One tensor from region to region; either time by the clock of its own region."""

    microbatch: int
    sent_s: float
    came_s: float
    size_bytes: int

    @property
    def raw_s(self) -> float:
        """Its delay, and the clocks' difference with it."""
        return self.came_s - self.sent_s


def crossings(
    sender: Timings, receiver: Timings, sent: Sequence[Ran], taken: Sequence[Ran], sizes: "Sizes"
) -> list[Crossing]:
    """What went one way over a boundary, in the order in which it was sent.

    A tensor is sent at the end of the action that made it.
    """
    came = {run.microbatch: run.came_us for run in taken}
    return [
        Crossing(
            run.microbatch,
            (sender.origin_us + run.end_us) / 1e6,
            (receiver.origin_us + came[run.microbatch]) / 1e6,
            sizes.get(run.microbatch, 0),
        )
        for run in sent
        if run.microbatch in came
    ]


Sizes = dict[int, int]
"""Bytes of a boundary's tensors by microbatch: gradients are as large as what they belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """One boundary in one step."""

    down: list[Crossing]
    """Activations."""
    up: list[Crossing]
    """Gradients."""
    offset_s: float
    """By how much the clock behind the boundary is ahead of the one before it."""
    latency_s: float
    """One way, for a message of no length."""
    s_per_byte: float
    """What a tensor takes besides, for each of its bytes."""


class Joints:
    """Every boundary of the line, step after step."""

    def __init__(self, num_regions: int) -> None:
        self._records: list[deque[float]] = [deque(maxlen=_RECORDS) for _ in range(num_regions - 1)]

    def take_in(self, timings: Sequence[Timings]) -> list[Joint]:
        """What one step shows. One report of each region, in order."""
        joints = []
        for index, records in enumerate(self._records):
            upper, lower = timings[index], timings[index + 1]
            told_us = upper.origin_us + upper.opened_us
            records.append((lower.origin_us + lower.heard_us - told_us) / 1e6)
            joints.append(_joint(upper, lower, statistics.median(records)))
        return joints


def _joint(upper: Timings, lower: Timings, record_s: float) -> Joint:
    sizes = {run.microbatch: run.size_bytes for run in lower.forward}
    down = crossings(upper, lower, upper.forward, lower.forward, sizes)
    up = crossings(lower, upper, lower.backward, upper.backward, sizes)
    if not down:
        return Joint(down=down, up=up, offset_s=record_s, latency_s=0.0, s_per_byte=0.0)
    quickest = min(down, key=lambda each: each.raw_s)
    transfer_s = max(0.0, quickest.raw_s - record_s)
    s_per_byte = transfer_s / quickest.size_bytes if quickest.size_bytes else 0.0
    if not up:  # no gradient flows back: the link's length cannot be told from the clocks
        return Joint(down=down, up=up, offset_s=record_s, latency_s=0.0, s_per_byte=s_per_byte)
    back = min(up, key=lambda each: each.raw_s)
    both_s = quickest.raw_s + back.raw_s
    # What the record took too long for must not make the link's length negative.
    transfer_s = min(transfer_s, max(0.0, both_s / 2))
    latency_s = max(0.0, both_s / 2 - transfer_s)
    return Joint(
        down=down,
        up=up,
        offset_s=(quickest.raw_s - back.raw_s) / 2,
        latency_s=latency_s,
        s_per_byte=transfer_s / quickest.size_bytes if quickest.size_bytes else 0.0,
    )
