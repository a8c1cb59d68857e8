"""What is usual: a line through what was seen before, and when something has left it.

Work and sizes differ from microbatch to microbatch, so a time is compared with what its own work
should take: overhead + slope x work, through the steps in which all was well.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

RECENT_STEPS = 5
"""In which a figure must be off three times: one or two may have had bad luck."""
KEPT_STEPS = 50
"""That a baseline rests on: enough for a mean, few enough to follow a slow drift."""
LEAST_STEPS = 5
"""Before that, nothing is usual yet."""
_BEYOND = 1.5
"""Work this much above the most, or below the least, that was seen is of a size not known."""
_SEEN = 2
"""Steps with a size that do not suffice to know it."""
_LOG_STEP = math.log(1.2)
"""Points whose work differs by less than this count as of one size."""
_FIT_EVERY = 4
_TO_SIGMA = 1.4826
"""From the median distance to the standard deviation, for normal noise."""

Point = tuple[float, float]
"""(work, seconds)."""


class Baseline:
    """A line through what the last steps showed, that single bad ones hardly move.

    Args:
        through_zero: Whether no work takes no time at least: true of times, not of the difference
            of two clocks. Where all work was the same, a time is then in proportion to it.
    """

    def __init__(self, *, through_zero: bool) -> None:
        self._through_zero = through_zero
        self._steps: deque[list[Point]] = deque(maxlen=KEPT_STEPS)
        self._zero_s: float | None = None
        self._line: tuple[float, float] | None = None
        self._num_added = 0

    @property
    def is_ready(self) -> bool:
        return len(self._steps) >= LEAST_STEPS

    def knows(self, points: Sequence[Point]) -> bool:
        """Whether work of about this size was seen before, in enough steps to go by."""
        if not self.is_ready:
            return False
        middle = statistics.median(work for work, _ in points)
        # Not the least and the most: a size that came once or twice is not known well.
        least = sorted(step[0][0] for step in self._steps)[_SEEN]
        most = sorted(step[-1][0] for step in self._steps)[-1 - _SEEN]
        return least / _BEYOND <= middle <= most * _BEYOND

    def add(self, points: Sequence[Point]) -> None:
        """One step in which all was well."""
        if not points:
            return
        if self._zero_s is None:
            # Two clocks may differ by months; sums of squares are not to suffer by it.
            self._zero_s = 0.0 if self._through_zero else points[0][1]
        moved = sorted((work, time_s - self._zero_s) for work, time_s in points)
        # A microbatch that had bad luck does not move the middle of its half.
        half = len(moved) // 2
        self._steps.append([_middle(each) for each in (moved[:half], moved[half:]) if each])
        self._num_added += 1
        # With many steps seen, one more hardly matters.
        if len(self._steps) < _FIT_EVERY * LEAST_STEPS or self._num_added % _FIT_EVERY == 0:
            self._line = None

    def predict(self, work: float) -> float:
        """The seconds that it should take; only once there is anything to go by."""
        if self._line is None:
            self._line = self._fit()
        overhead_s, slope_s = self._line
        return overhead_s + slope_s * work

    def _fit(self) -> tuple[float, float]:
        """Least squares through the medians of points with about the same work."""
        assert self._steps and self._zero_s is not None
        sizes: dict[int, list[Point]] = {}
        for point in (point for step in self._steps for point in step):
            sizes.setdefault(_size_class(point[0]), []).append(point)
        # Of a size that came once or twice the median may be anything.
        enough = [each for each in sizes.values() if len(each) > _SEEN] or list(sizes.values())
        overhead_s, slope_s = self._least_squares([(_middle(each), len(each)) for each in enough])
        return overhead_s + self._zero_s, slope_s

    def _least_squares(self, points: Sequence[tuple[Point, int]]) -> tuple[float, float]:
        """Through points that stand for so many each."""
        total = x = y = xx = xy = 0.0
        for (work, time_s), count in points:
            weight = math.sqrt(count)
            if self._through_zero and time_s > 0:
                weight /= time_s**2  # what counts is by which share a time is off
            total += weight
            x += weight * work
            y += weight * time_s
            xx += weight * work * work
            xy += weight * work * time_s
        mean_x, mean_y = x / total, y / total
        spread = xx / total - mean_x**2
        is_spread = spread > 1e-6 * mean_x**2
        slope_s = max(0.0, (xy / total - mean_x * mean_y) / spread) if is_spread else 0.0
        overhead_s = mean_y - slope_s * mean_x
        if self._through_zero and xx and (overhead_s < 0 or not is_spread):
            return 0.0, xy / xx
        return overhead_s, slope_s


def _size_class(work: float) -> int:
    return int(math.log(work) / _LOG_STEP) if work >= 1 else -1


def _middle(points: Sequence[Point]) -> Point:
    return (
        statistics.median(work for work, _ in points),
        statistics.median(time_s for _, time_s in points),
    )


class Watch:
    """Tells when a figure has left its usual range for good, and when it is back."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        self._usual: deque[float] = deque(maxlen=KEPT_STEPS)
        self.since: int | None = None
        """The first step that was off, while it is."""
        self.middle = 0.0
        """The median of the last steps."""

    @property
    def noise(self) -> float:
        """The standard deviation of what is usual, one step at a time, without its outliers."""
        if len(self._usual) < LEAST_STEPS:
            return 0.0
        middle = statistics.median(self._usual)
        return _TO_SIGMA * statistics.median(abs(each - middle) for each in self._usual)

    def take_in(self, step: int, value: float, *, limit: float) -> bool:
        """One step's figure, 0 where all is as usual. Returns whether the step was usual.

        Args:
            limit: From which on it is off; back it is below half of that.
        """
        self._recent.append((step, value))
        values = [each for _, each in self._recent]
        self.middle = statistics.median(values)
        if self.since is None:
            if sum(each > limit for each in values) > RECENT_STEPS / 2:
                self.since = self._first_above(limit)
        elif len(values) > RECENT_STEPS / 2 and self.middle < limit / 2:
            self.since = None
        is_usual = self.since is None and value <= limit
        if is_usual:
            self._usual.append(value)
        return is_usual

    def _first_above(self, least: float) -> int:
        """The first of the last steps that was above this."""
        return next(at for at, each in self._recent if each > least)
