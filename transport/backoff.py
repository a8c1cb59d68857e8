"""How long to wait before the next attempt to connect."""

from random import Random

FIRST_S = 0.2
LONGEST_S = 10.0
HELD_S = 1.0
"""A connection that lived so long was a good one: after its end the first try is soon."""


class Backoff:
    """Doubling delays, jittered over their upper half so that peers do not retry in step."""

    def __init__(self, rng: Random, *, first_s: float = FIRST_S, longest_s: float = LONGEST_S):
        self._rng = rng
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_delay_s(self) -> float:
        """Between half of and the whole current delay, never below the first; then it doubles."""
        delay_s = max(self._first_s, self._next_s * (0.5 + 0.5 * self._rng.random()))
        self._next_s = min(self._next_s * 2, self._longest_s)
        return delay_s

    def reset(self) -> None:
        """After a connection that held."""
        self._next_s = self._first_s
