"""How fast a link may send so that no queue stands in front of its path. Pure.

Control records share the path's queue with bulk, so what bulk leaves standing there is what control
waits. A sender cannot see the queue, but its delay: round trips against the shortest ever seen.
While a queue stands, what arrives per second *is* what the path carries; a cap a little below that
drains it. While none stands, the cap rises again, slowly at first.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

TARGET_S = 0.010
"""A queue up to here, plus the jitter seen, is left alone: some must stand to know the rate."""
INTERVAL_S = 0.1
FIRST_INTERVAL_S = 0.05
"""Before the first cap: a connection that starts doubles its rate with every round trip."""
LONGEST_INTERVAL_S = 0.3
DRAIN_S = 0.25
"""In about this time a queue is to be gone: the deeper it is, the further below the rate."""
LEAST_SHARE = 0.5
STEEPEST_FALL = 0.7
"""Of the estimated rate from one interval to the next, so that one bad sample costs little."""
SLOW_GROWTH = 0.005
FAST_GROWTH = 0.25
SLOW_INTERVALS = 25
"""So long after a queue the cap grows slowly, near the rate; then ever faster: it has changed.
Growth is by INTERVAL_S."""
SEARCH_GROWTH = 0.4
"""Each interval, until two with a queue, or two queues, have shown about the same rate. With less
than a quarter each round trip BBR believes that the path is full, and it stays so for long."""
STILL_GROWING, HELD_GROWTH = 1.25, 1.5
"""A connection that starts, and delivers so much more than a round trip ago, has not filled the
path for a whole interval: what it delivered is not what the path carries."""
FULL = 0.8
STUCK_RTTS, STUCK_S = 3, 0.2
SAME_RATE, SAME_MOMENT, NOT_ALL = 0.2, 0.1, 0.9
MORE_THAN_OFFERED = 1.1
"""Of the cap two intervals ago, which all that arrives now was sent under if no queue stood."""
LEAST_BELIEVED = 0.4
"""Of what got through when the queue was first seen. A path that became longer looks like a queue
that no cap shortens: without this the cap would fall until that is understood, and take long to
come back."""
CERTAIN = 4
"""A queue of so many times the target is acted on at once; a smaller one when it is there twice."""
GOT_THROUGH = 0.8
STANDING_INTERVALS = 2
"""What the path carries is the most of so many intervals with a queue: bulk that comes the other
way delays acknowledgements, so that one interval may show half of it."""
OPEN = 4
"""While there is less to send than the path carries, the cap opens to so many times its rate: it is
not needed, and must hold back no single message."""
RETURN_GROWTH = 0.05
"""Back to what the path carried of late, where one bad moment had lowered the cap."""
CLOCK_DRIFT = 1e-4
PEAK_INTERVALS = 50
PEAK_SHARE = 0.9
FLOOR_BYTES_PER_S = 64e3


class Pacing:
    """The cap of one link's sending, all its bulk lanes together."""

    def __init__(self) -> None:
        self.cap_bytes_per_s: float | None = None
        """None: no queue was ever seen, the kernel's own control is enough."""
        self.reason = "no queue was seen yet"
        self.queue_s = 0.0
        """How long the standing queue was in the last interval."""
        self._base_s = self._way_base_s = math.inf
        self._jitter_s = 0.0
        self._path_rate = 0.0
        self._rates: deque[float] = deque(maxlen=PEAK_INTERVALS)
        self._confirmed = self._proven = False
        self._over_rate = self._rate_at_first = 0.0
        self._standing_rates: deque[float] = deque(maxlen=STANDING_INTERVALS)
        self._caps: deque[float] = deque([math.inf] * 3, maxlen=3)
        """In force during the last intervals, the oldest first."""
        self._previous_rate = 0.0
        self._calm_intervals = 0
        self._was_over = False
        self._episode_s = 0.0
        self._deepest_s = 0.0
        self._cap_before: float | None = None

    @property
    def target_s(self) -> float:
        return TARGET_S + self._jitter_s

    @property
    def is_queueing(self) -> bool:
        return self.queue_s > self.target_s

    @property
    def is_full(self) -> bool:
        """Whether about as much is sent as the path carries, as far as it is known."""
        if self.cap_bytes_per_s is None or not self._rates:
            return False
        known = self._path_rate if self._confirmed else math.inf
        return self._rates[-1] >= FULL * min(self.cap_bytes_per_s, known)

    @property
    def interval_s(self) -> float:
        """How long the next interval should last."""
        if self.cap_bytes_per_s is None:
            return FIRST_INTERVAL_S
        return min(max(self._base_s, INTERVAL_S), LONGEST_INTERVAL_S)

    def on_interval(
        self,
        *,
        rtts_s: Sequence[float],
        delivered_bytes: int,
        elapsed_s: float,
        busy: bool,
        waiting_s: float = 0.0,
        kernel_rtt_s: float | None = None,
        ways_s: Sequence[float] = (),
    ) -> tuple[float | None, str]:
        """Decide the cap for the next interval.

        Args:
            rtts_s: Round trips of the control lane that ended in this interval.
            delivered_bytes: What the peer's kernel acknowledged of bulk in it.
            busy: Whether there was bulk to send all the time.
            waiting_s: How long the oldest unanswered ping has been waiting.
            kernel_rtt_s: The round trip of bulk as the kernels see it, where they tell: processes
                that wait for a core, here or there, make pings late, but not these.
            ways_s: Of the same pings, how long each took to the peer, by two clocks: what stands in
                the other direction is the peer's, and for it to drain.

        Returns:
            Bytes per second, or None for no cap; and why.
        """
        lowest_s = min(rtts_s, default=waiting_s)
        if not rtts_s and waiting_s < STUCK_RTTS * self._base_s + STUCK_S:
            # A lost control segment holds back the answers for a round trip: that is no queue.
            return self.cap_bytes_per_s, self.reason
        if rtts_s:
            self._base_s = min(self._base_s, lowest_s)
        self._caps.append(self.cap_bytes_per_s or math.inf)
        # The least of several: jitter and a busy machine delay some, a standing queue all.
        kernels_s = math.inf if kernel_rtt_s is None else kernel_rtt_s
        queue_s = min(lowest_s, kernels_s) - self._base_s
        if ways_s:
            # Two clocks run apart, so that an old least may be too little.
            self._way_base_s = min(self._way_base_s + CLOCK_DRIFT * elapsed_s, *ways_s)
            queue_s = min(queue_s, min(ways_s) - self._way_base_s)
        self.queue_s = max(0.0, queue_s)
        rate = delivered_bytes / elapsed_s
        self._rates.append(rate)
        was_over, self._was_over = self._was_over, self.is_queueing
        if self.is_queueing:
            if not was_over:
                self._cap_before = self.cap_bytes_per_s
            self._standing_rates.append(rate)
            if self._is_starting(rate, elapsed_s):
                # The queue may be only beginning: no further doubling, but no less either.
                self.cap_bytes_per_s = max(FLOOR_BYTES_PER_S, HELD_GROWTH * rate)
                self.reason = f"{self.queue_s * 1e3:.0f} ms of queue at the start"
            elif was_over or self.queue_s > CERTAIN * self.target_s:
                self._lower(rate, elapsed_s, busy)
        else:
            self._standing_rates.clear()
            if rtts_s:
                self._jitter_s += 0.1 * (median(rtts_s) - lowest_s - self._jitter_s)
            if self._deepest_s > 0.0:
                self._end_episode()
            if self.cap_bytes_per_s is not None and self.queue_s < self.target_s / 3:
                self._raise(rate, busy)
        return self.cap_bytes_per_s, self.reason

    def _is_starting(self, rate: float, elapsed_s: float) -> bool:
        if self.cap_bytes_per_s is not None or len(self._rates) < 2:
            return False
        back = max(1, math.ceil(self._base_s / elapsed_s)) if math.isfinite(self._base_s) else 1
        before = self._rates[max(0, len(self._rates) - 1 - back)]
        return rate > STILL_GROWING * before

    def _lower(self, rate: float, elapsed_s: float, busy: bool) -> None:
        if self._deepest_s == 0.0:
            self._path_rate = self._peak
            self._rate_at_first = max(self._standing_rates)
            self._proven, self._over_rate = False, 0.0
        if self.queue_s > 2 * self._deepest_s or self.queue_s < self._deepest_s / 2:
            # A new queue, much more of it, or half of it gone: the patience begins anew.
            self._episode_s, self._deepest_s = 0.0, self.queue_s
        share = max(LEAST_SHARE, 1 - self.queue_s / DRAIN_S)
        patience_s = 2 * self._deepest_s / (1 - share) + 3 * self.interval_s
        offered = self.cap_bytes_per_s or math.inf
        differs = rate < NOT_ALL * offered or rate > MORE_THAN_OFFERED * self._caps[0]
        if differs and abs(rate - self._over_rate) < SAME_MOMENT * rate:
            # More was offered than came through, twice, or more came than was offered, out of a
            # queue that drains: that is what the path carries.
            self._proven = True
        self._over_rate = rate
        is_ours = not busy or rate >= GOT_THROUGH * offered
        if self.cap_bytes_per_s is not None and is_ours:
            # Less is sent than leaves the queue, if it is ours: it must become shorter.
            self._episode_s += elapsed_s
        if self._episode_s > patience_s:
            self._accept_delay()
            return
        fallen = max(*self._standing_rates, STEEPEST_FALL * self._path_rate)
        # Where the cap alone holds it back, what gets through says less and less of the path.
        self._path_rate = max(fallen, LEAST_BELIEVED * self._rate_at_first) if is_ours else fallen
        self.cap_bytes_per_s = max(FLOOR_BYTES_PER_S, share * self._path_rate)
        self._calm_intervals = 0
        self.reason = f"{self.queue_s * 1e3:.0f} ms of queue"

    def _end_episode(self) -> None:
        before, self._previous_rate = self._previous_rate, self._path_rate
        same = abs(self._path_rate - before) < SAME_RATE * self._path_rate
        self._confirmed = same or self._proven
        self._episode_s = self._deepest_s = 0.0

    def _accept_delay(self) -> None:
        """Less sent did not shorten it: another path, or someone else's queue."""
        self._base_s += self.queue_s
        self._way_base_s += self.queue_s
        self.queue_s = self._episode_s = self._deepest_s = 0.0
        self.cap_bytes_per_s = self._cap_before
        self.reason = "the delay is not from our own queue"

    def _raise(self, rate: float, busy: bool) -> None:
        assert self.cap_bytes_per_s is not None
        cap = self.cap_bytes_per_s
        self._calm_intervals += 1
        if cap < 0.98 * self._path_rate:
            # The queue is drained; this much the path carried a moment ago.
            self.cap_bytes_per_s = 0.98 * self._path_rate
        elif cap < PEAK_SHARE * self._peak:
            self._grow(RETURN_GROWTH)
        elif busy and rate > 0.5 * cap:
            excess = max(0, self._calm_intervals - SLOW_INTERVALS)
            growth = min(SLOW_GROWTH * 1.5 ** min(excess, 20), FAST_GROWTH)
            if self._confirmed:
                self._grow(growth)
            else:
                self.cap_bytes_per_s = cap * (1 + SEARCH_GROWTH)
        elif not busy and cap < OPEN * max(self._path_rate, self._peak):
            self._grow(RETURN_GROWTH)
        self.reason = "no queue"

    def _grow(self, growth: float) -> None:
        # Per INTERVAL_S: what is too much stands in the queue for as long as an interval lasts.
        assert self.cap_bytes_per_s is not None
        self.cap_bytes_per_s *= 1 + growth * INTERVAL_S / self.interval_s

    @property
    def _peak(self) -> float:
        return max(self._rates, default=0.0)


def shares_of(rates: Sequence[float | None]) -> list[float]:
    """What part of a cap each lane gets, by the rates that they had.

    Lanes differ: one has just been opened, one has met a loss. A slow one may double, and the sum
    is then above 1: what is too much shows as a queue, and lowers the cap.
    """
    if not rates:
        return []
    total = sum(rate or 0.0 for rate in rates)
    if total == 0.0:
        return [1 / len(rates)] * len(rates)
    least = 0.5 / len(rates)
    return [max((rate or 0.0) / total, least) for rate in rates]
