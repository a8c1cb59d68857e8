"""The pings of one lane: when the next is due, how old the oldest unanswered one is. Pure."""

from collections import deque

BUSY_INTERVAL_S = 0.025
"""While bulk flows, round trips are what pacing goes by (pacing.py)."""

LEAST_SILENCE_S = 2.0
"""A busy machine may be so long without an answer; no lane is given up sooner for it."""


class Pings:
    """Numbered from 1; an answer to one answers all before it."""

    def __init__(self, *, interval_s: float) -> None:
        self.interval_s = interval_s
        """May change at any time."""
        self._sent: deque[tuple[int, float]] = deque()
        self._count = 0
        self._last_sent_s: float | None = None
        self.answered = False
        """Whether any was."""
        self.last_s: float | None = None
        """The newest round trip."""
        self.slowest_s = 0.0
        """The longest round trip so far."""

    @property
    def due_s(self) -> float:
        """When the next is to be sent; 0: at once."""
        return 0.0 if self._last_sent_s is None else self._last_sent_s + self.interval_s

    @property
    def oldest_s(self) -> float | None:
        """When the oldest unanswered one was sent."""
        return self._sent[0][1] if self._sent else None

    def are_lost(self, now: float, silent_s: float, works_s: float) -> bool:
        """Whether the lane is dead (P-11).

        Args:
            works_s: When the path was last seen to work by another lane: then this one is given up
                sooner.
        """
        oldest_s = self.oldest_s
        if oldest_s is None:
            return False
        limit_s = max(silent_s / 4, LEAST_SILENCE_S, 4 * self.slowest_s)
        return now >= oldest_s + silent_s or works_s >= oldest_s + min(limit_s, silent_s)

    def send(self, *, now: float) -> int:
        """The number of a ping that is sent now."""
        self._count += 1
        self._sent.append((self._count, now))
        self._last_sent_s = now
        return self._count

    def on_pong(self, number: int, *, now: float) -> float | None:
        """The round trip that this answer shows; None where it answers none that is waiting."""
        if not self._sent or number > self._sent[-1][0]:
            return None
        rtt_s, self.answered = None, True
        while self._sent and self._sent[0][0] <= number:
            found, sent = self._sent.popleft()
            if found == number:
                rtt_s = now - sent
                self.last_s = rtt_s
                self.slowest_s = max(self.slowest_s, rtt_s)
        return rtt_s
