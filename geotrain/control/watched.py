"""A stage and one direction of a link, step after step, against what is usual for them."""

import statistics
from collections import deque
from collections.abc import Sequence

from geotrain.control.baseline import RECENT_STEPS, Baseline, Watch
from geotrain.control.joints import Crossing
from geotrain.control.timings import Timings

SLOW = 0.25
"""A stage is slow from this much above its own usual time on; noisy stages from more on."""
MOST_SLOW = 0.4
"""However noisy: a stage at 1.5 times its usual time must not pass for noise."""
LATE = 0.5
"""A link is slow from this much above its own usual delay on."""
LATE_OF_MICROBATCH = 0.2
"""And from this share of the slowest stage's time for a microbatch on: less holds up nobody."""
LEAST_LATE_S = 0.005
NOISES = 5.0
"""Standard deviations of the noise that a figure must leave."""
STALLED_TIMES = 10.0
"""Or an action that took so many times what it should have, and STALLED_S besides."""


class StageWatch:
    """One region's compute, against what the same work took before."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.microbatch_s = 0.0
        """The median of the last step."""
        self.is_coding = False
        """Whether most of what it was slow by at first is copying and coding."""
        self._baseline = Baseline(through_zero=True)
        self._coding: deque[float] = deque(maxlen=RECENT_STEPS)
        self._coding_share = 0.0
        """What copying and coding usually take, of all that the stage should."""

    @property
    def factor(self) -> float:
        return 1.0 + self.watch.middle

    def longest_excess_s(self, own: Timings) -> float:
        """By how much an action of the step outlasted all that it could be expected to take."""
        if not self._baseline.is_ready:
            return 0.0
        excess_s = 0.0
        for work, time_s in _points(own):
            expected_s = self._baseline.predict(work)
            if time_s > STALLED_TIMES * expected_s:
                excess_s = max(excess_s, time_s - expected_s)
        return excess_s

    def take_in(self, step: int, own: Timings) -> None:
        points = _points(own)
        self.microbatch_s = statistics.median(time_s for _, time_s in points)
        if self.watch.since is None and not self._baseline.knows(points):
            self._baseline.add(points)
            return
        expected_s = [self._baseline.predict(work) for work, _ in points]
        ratios = [
            time_s / should_s - 1.0 if should_s > 0 else 0.0
            for (_, time_s), should_s in zip(points, expected_s, strict=True)
        ]
        limit = min(MOST_SLOW, max(SLOW, NOISES * self.watch.noise))
        since = self.watch.since
        is_usual = self.watch.take_in(step, statistics.median(ratios), limit=limit)
        share = own.coding_us / 1e6 / sum(expected_s) if sum(expected_s) > 0 else 0.0
        self._coding.append(share)
        if is_usual:
            self._baseline.add(points)
            self._coding_share += (share - self._coding_share) / 8
        elif since is None and self.watch.since is not None:
            more = statistics.median(self._coding) - self._coding_share
            self.is_coding = more > self.watch.middle / 2


def _points(own: Timings) -> list[tuple[float, float]]:
    """(bytes of the input, seconds of forward and backward) of each microbatch."""
    back_us = {run.microbatch: run.length_us for run in own.backward}
    return [
        (float(run.size_bytes), (run.length_us + back_us.get(run.microbatch, 0)) / 1e6)
        for run in own.forward
    ]


class WayWatch:
    """One direction of a link, against its own delay before.

    The delay has the difference of two clocks in it, which is the same before and now.
    """

    def __init__(self) -> None:
        self.watch = Watch()
        self.usual_s = 0.0
        """The delay that it had, without the clocks' difference."""
        self._baseline = Baseline(through_zero=False)

    @property
    def factor(self) -> float:
        return 1.0 + self.watch.middle / self.usual_s if self.usual_s > 0 else 1.0

    def take_in(
        self, step: int, crossed: Sequence[Crossing], *, other: "WayWatch", microbatch_s: float
    ) -> None:
        """
        Args:
            other: The way back: the sum of both has no clocks in it.
            microbatch_s: What the slowest stage takes for one.
        """
        points = [(float(each.size_bytes), each.raw_s) for each in _unqueued(crossed)]
        if not points:
            return
        if self.watch.since is None and not self._baseline.knows(points):
            self._baseline.add(points)
            return
        size = statistics.median(work for work, _ in points)
        if other._baseline.is_ready:
            both_s = self._baseline.predict(size) + other._baseline.predict(size)
            self.usual_s = max(both_s / 2, 1e-4)
        # A slow link delays them all; a machine that wakes up late, some of them.
        late = sorted(raw_s - self._baseline.predict(work) for work, raw_s in points)
        late_s = late[(len(late) - 1) // 4]
        limit = max(
            LATE * self.usual_s,
            NOISES * self.watch.noise,
            LATE_OF_MICROBATCH * microbatch_s,
            LEAST_LATE_S,
        )
        if self.watch.take_in(step, late_s, limit=limit):
            self._baseline.add(points)


def _unqueued(crossed: Sequence[Crossing]) -> list[Crossing]:
    """Those that had the link to themselves: the others waited for the ones ahead of them."""
    least_s = min((each.raw_s for each in crossed), default=0.0)
    found, free_s = [], float("-inf")
    for each in crossed:
        if each.sent_s >= free_s:
            found.append(each)
        free_s = each.came_s - least_s
    return found
