"""How many bulk lanes a link should have: as many as each doubling gains something. Pure."""

from geotrain.transport.lives import MAX_BULK_LANES

GAIN = 1.1
"""More lanes stay if they carry this much more."""
FALL = 0.7
"""Below this part of what it was, the rate has changed, and the number is tried again."""
MEASURED_S = 1.0
MEASURED_RTTS = 15
SETTLING_RTTS = 10
"""A new connection sends more than it can keep up, until its first loss."""
DIALLING_S = 5.0
"""After it, what has opened by then is measured."""
LEAST_RTT_S = 0.005
"""Nearer peers need one lane: windows are large enough, and losses are mended at once."""
FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 600.0


class LaneCount:
    """Doubles while it pays. Only time in which there was always something to send counts."""

    def __init__(self, fixed: int | None = None) -> None:
        self.wanted = 1 if fixed is None else fixed
        self.reason = "the first" if fixed is None else "as configured"
        self._fixed = fixed is not None
        self._before: tuple[int, float] | None = None
        """While more are tried: the number and the rate that they are compared with."""
        self._rate: float | None = None
        """Of the present number, when it was decided for."""
        self._trying_since = 0.0
        self._next_try = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._busy_s = self._settling_s = 0.0
        self._bytes = 0
        self._was_full = self._was_held_back = False
        self._blind_from: float | None = None

    def on_interval(
        self,
        *,
        now: float,
        delivered_bytes: int,
        elapsed_s: float,
        busy: bool,
        is_full: bool,
        is_held_back: bool,
        rtt_s: float | None,
        num_open: int,
    ) -> tuple[int, str]:
        """Decide on the number wanted.

        Args:
            busy: Whether there was something to send all the time.
            is_full: Whether the path, as far as pacing knows it, carries what it can.
            is_held_back: Whether some lane met a loss or the end of a window: more lanes should
                help. Without that they are tried after a while all the same, for something else may
                limit each connection.
            rtt_s: The shortest round trip; None where it is not known yet.
            num_open: Lanes that carry chunks now.
        """
        if self._fixed or rtt_s is None or not busy:
            return self.wanted, self.reason
        if self._before is not None and self._still_opening(now, num_open):
            return self.wanted, self.reason
        self._settling_s += elapsed_s
        if self._settling_s > SETTLING_RTTS * rtt_s:
            self._was_full = self._was_full or is_full
            self._was_held_back = self._was_held_back or is_held_back
            self._busy_s += elapsed_s
            self._bytes += delivered_bytes
        if self._busy_s >= max(MEASURED_S, MEASURED_RTTS * rtt_s):
            rate, was_full = self._bytes / self._busy_s, self._was_full
            was_held_back = self._was_held_back
            self._begin_measuring()
            more_may_help = not was_full and rtt_s >= LEAST_RTT_S
            if self._before is not None:
                more_may_help = self._judge(now, rate) and more_may_help
            if more_may_help:
                self._consider(now, rate, was_held_back)
        return self.wanted, self.reason

    def _still_opening(self, now: float, num_open: int) -> bool:
        opening = num_open < self.wanted and now - self._trying_since < DIALLING_S
        if opening:
            self._begin_measuring(settled=False)
        return opening

    def _begin_measuring(self, *, settled: bool = True) -> None:
        self._busy_s, self._bytes = 0.0, 0
        self._was_full = self._was_held_back = False
        if not settled:
            self._settling_s = 0.0

    def _consider(self, now: float, rate: float, was_held_back: bool) -> None:
        if self._blind_from is None:
            self._blind_from = now + FIRST_PAUSE_S
        due = self._next_try if was_held_back else max(self._next_try, self._blind_from)
        fell = self._rate is not None and rate < FALL * self._rate
        self._rate = rate
        if fell:
            # This time was partly before, partly after: compare with a whole one.
            self._next_try, self._pause_s = now, FIRST_PAUSE_S
        elif rate > 0 and now >= due and self.wanted < MAX_BULK_LANES:
            self._before = (self.wanted, rate)
            self._trying_since = now
            self.wanted = min(2 * self.wanted, MAX_BULK_LANES)
            self.reason = f"trying {self.wanted} after {_mbit(rate)} over {self._before[0]}"
            self._begin_measuring(settled=False)

    def _judge(self, now: float, rate: float) -> bool:
        """Keep what was tried, or go back; returns whether it was kept."""
        assert self._before is not None
        (number, before), self._before = self._before, None
        tried = f"{self.wanted} carried {_mbit(rate)}, {number} carried {_mbit(before)}"
        self.reason = tried
        if rate > GAIN * before:
            self._rate, self._pause_s, self._next_try = rate, FIRST_PAUSE_S, now
            return True
        self.wanted, self._rate = number, before
        self._next_try = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._begin_measuring(settled=False)
        return False


def _mbit(rate_bytes_per_s: float) -> str:
    return f"{rate_bytes_per_s * 8e-6:.0f} Mbit/s"
