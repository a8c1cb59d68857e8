"""What is usual: a line through what was seen before, and when something has left it.

Work and sizes differ from microbatch to microbatch, so a time is compared with what its own work
should take: overhead + slope x work, through the steps in which all was well.
"""

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
"""Work this much above the most, or below the least, that was seen is another kind of work."""
_TO_SIGMA = 1.4826
"""From the median distance to the standard deviation, for normal noise."""

Point = tuple[float, float]
"""(work, seconds)."""


class Baseline:
    """A line through the points of the last steps.

    Args:
        through_zero: Whether no work takes no time at least: true of times, not of the difference
            of two clocks. Where all work was the same, a time is then in proportion to it.
    """

    def __init__(self, *, through_zero: bool) -> None:
        self._through_zero = through_zero
        self._steps: deque[tuple[float, ...]] = deque(maxlen=KEPT_STEPS)
        self._ranges: deque[tuple[float, float]] = deque(maxlen=KEPT_STEPS)
        self._unknown = 0
        self._zero_s: float | None = None
        self._line: tuple[float, float] | None = None

    @property
    def is_ready(self) -> bool:
        return len(self._steps) >= LEAST_STEPS

    def knows(self, points: Sequence[Point]) -> bool:
        """Whether work of about this size was seen before; true before anything was.

        Where steps running are of another size, all that was seen is forgotten.
        """
        if not self._ranges or not points:
            return True
        middle = statistics.median(work for work, _ in points)
        least = min(least for least, _ in self._ranges)
        most = max(most for _, most in self._ranges)
        if least / _BEYOND <= middle <= most * _BEYOND:
            self._unknown = 0
            return True
        self._unknown += 1
        if self._unknown > RECENT_STEPS / 2:
            self._steps.clear()
            self._ranges.clear()
            self._line = None
        return False

    def add(self, points: Sequence[Point]) -> None:
        """One step in which all was well."""
        if not points:
            return
        if self._zero_s is None:
            # Two clocks may differ by months; sums of squares are not to suffer by it.
            self._zero_s = 0.0 if self._through_zero else points[0][1]
        moved = [(work, time_s - self._zero_s) for work, time_s in points]
        self._steps.append(
            (
                float(len(moved)),
                sum(work for work, _ in moved),
                sum(time_s for _, time_s in moved),
                sum(work * work for work, _ in moved),
                sum(work * time_s for work, time_s in moved),
            )
        )
        self._ranges.append((min(work for work, _ in moved), max(work for work, _ in moved)))
        self._line = None

    def predict(self, work: float) -> float:
        """The seconds that it should take; only once there is anything to go by."""
        if self._line is None:
            self._line = self._fit()
        overhead_s, slope_s = self._line
        return overhead_s + slope_s * work

    def _fit(self) -> tuple[float, float]:
        assert self._steps and self._zero_s is not None
        count, x, y, xx, xy = (sum(column) for column in zip(*self._steps, strict=True))
        mean_x, mean_y = x / count, y / count
        spread = xx / count - mean_x**2
        is_spread = spread > 1e-6 * mean_x**2
        slope_s = max(0.0, (xy / count - mean_x * mean_y) / spread) if is_spread else 0.0
        overhead_s = mean_y - slope_s * mean_x
        if self._through_zero and xx and (overhead_s < 0 or not is_spread):
            return 0.0, xy / xx
        return overhead_s + self._zero_s, slope_s


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
                self.since = next(at for at, each in self._recent if each > limit)
        elif len(values) > RECENT_STEPS / 2 and self.middle < limit / 2:
            self.since = None
        is_usual = self.since is None and value <= limit
        if is_usual:
            self._usual.append(value)
        return is_usual
