"""One direction of an emulated link: which bytes leave when, decided without a clock.

Bytes are serialised one after another at the rate, then travel for the one-way delay. What a shaper
holds is bounded by the bandwidth-delay product and a queue; beyond that the sender must wait.
"""

from collections import deque
from dataclasses import dataclass

_MIN_BOUND_BYTES = 256 << 10
_UNLIMITED_BOUND_BYTES = 64 << 20
_SEGMENT_S = 0.001
_MIN_SEGMENT_BYTES, _MAX_SEGMENT_BYTES = 1_500, 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a link is like, the same in both directions."""

    rtt_s: float = 0.0
    rate_bytes_per_s: float | None = None
    """None: as fast as the machine."""
    queue_s: float = 0.05
    """How much the link buffers beyond what is travelling, as time at its rate."""

    def __post_init__(self) -> None:
        if self.rtt_s < 0 or self.queue_s < 0:
            raise ValueError(f"rtt_s and queue_s must not be negative (got {self})")
        if self.rate_bytes_per_s is not None and self.rate_bytes_per_s <= 0:
            raise ValueError(f"rate_bytes_per_s must be > 0 (got {self.rate_bytes_per_s})")


class Shaper:
    """One direction of a link: which bytes leave when."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._line: deque[tuple[float, memoryview | None]] = deque()
        self._line_free_at = 0.0
        self._last_due = 0.0
        self.held_bytes = 0

    def change(self, conditions: Conditions) -> None:
        """New conditions for what is pushed from now on; what is under way keeps its times."""
        self._conditions = conditions

    def push(self, data: bytes, *, now: float) -> None:
        """Take bytes from the sender; order is kept even when the delay falls meanwhile."""
        rate = self._conditions.rate_bytes_per_s
        view = memoryview(data)
        for start in range(0, len(view), self._segment_bytes):
            segment = view[start : start + self._segment_bytes]
            self._line_free_at = max(self._line_free_at, now)
            if rate is not None:
                self._line_free_at += len(segment) / rate
            self._append(segment)
        self.held_bytes += len(view)

    def push_end(self, *, now: float) -> None:
        """The sender has finished; the end follows its last byte."""
        self._line_free_at = max(self._line_free_at, now)
        self._append(None)

    def pop_due(self, *, now: float) -> list[memoryview | None]:
        """What leaves by now, in order; None is the end."""
        due = []
        while self._line and self._line[0][0] <= now:
            segment = self._line.popleft()[1]
            if segment is not None:
                self.held_bytes -= len(segment)
            due.append(segment)
        return due

    def next_due(self) -> float | None:
        return self._line[0][0] if self._line else None

    @property
    def full(self) -> bool:
        """Whether the sender must wait."""
        return self.held_bytes >= self._bound_bytes

    @property
    def _bound_bytes(self) -> float:
        rate = self._conditions.rate_bytes_per_s
        if rate is None:
            return _UNLIMITED_BOUND_BYTES
        travelling = rate * self._conditions.rtt_s / 2
        return max(_MIN_BOUND_BYTES, travelling + rate * self._conditions.queue_s)

    @property
    def _segment_bytes(self) -> int:
        rate = self._conditions.rate_bytes_per_s
        if rate is None:
            return _MAX_SEGMENT_BYTES
        return min(max(int(rate * _SEGMENT_S), _MIN_SEGMENT_BYTES), _MAX_SEGMENT_BYTES)

    def _append(self, segment: memoryview | None) -> None:
        due = self._line_free_at + self._conditions.rtt_s / 2
        self._last_due = max(self._last_due, due)
        self._line.append((self._last_due, segment))
