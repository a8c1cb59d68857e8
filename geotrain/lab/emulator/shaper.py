"""One direction of a relayed connection: which bytes leave when, decided without a clock.

The bytes of all connections of a direction are serialised one after another at the rate of the one
wire, then travel for the one-way delay. Where the wire's queue is full, senders must wait.

A relay carries a stream, out of which nothing can be lost: for a lost segment, all that follows
waits for one more round trip, which is what sending it again costs. What congestion control does
about a loss cannot be had this way.
"""

import math
from collections import deque
from random import Random

from geotrain.lab.emulator.chance import Jitter, Loss
from geotrain.lab.settings import MSS_BYTES, LinkSettings

_MIN_BOUND_BYTES = 256 << 10
_UNLIMITED_BOUND_BYTES = 64 << 20
_SEGMENT_S = 0.001
_MIN_SEGMENT_BYTES, _MAX_SEGMENT_BYTES = 1_500, 64 << 10


class Wire:
    """What the connections of one direction share: when it has sent all that it was given."""

    def __init__(self) -> None:
        self.free_at = 0.0


class Shaper:
    """Takes what one side sends and says what the other side gets, and when."""

    def __init__(self, settings: LinkSettings, rng: Random, wire: Wire) -> None:
        self._settings = settings
        self._wire = wire
        self._loss = Loss(settings.loss, rng)
        self._jitter = Jitter(settings.jitter_s, rng)
        self._silent_since: float | None = None
        self._line: deque[tuple[float, memoryview | None]] = deque()
        self._last_due = 0.0
        self.held_bytes = 0
        self.forgotten = False
        """The connection was silent for too long: what comes now is dropped, and no one told."""

    def change(self, settings: LinkSettings) -> None:
        """New settings for what is pushed from now on; what is under way keeps its times."""
        if settings.loss != self._settings.loss:
            self._loss.change(settings.loss)
        if settings.jitter_s != self._settings.jitter_s:
            self._jitter.change(settings.jitter_s)
        self._settings = settings

    def push(self, data: bytes, *, now: float) -> None:
        """Take bytes from the sender; order is kept even when the delay falls meanwhile."""
        if self._forgets(now):
            return
        rate = self._settings.rate_bytes_per_s
        view = memoryview(data)
        for start in range(0, len(view), self._segment_bytes):
            segment = view[start : start + self._segment_bytes]
            self._wire.free_at = max(self._wire.free_at, now)
            if rate is not None:
                self._wire.free_at += len(segment) / rate
            lost = self._loss.among(-(-len(segment) // MSS_BYTES))
            self._append(segment, again_s=2 * self._settings.delay_s if lost else 0.0, now=now)
        self.held_bytes += len(view)

    def push_end(self, *, now: float) -> None:
        """The sender has finished; the end follows its last byte."""
        if not self.forgotten:
            self._wire.free_at = max(self._wire.free_at, now)
            self._append(None, again_s=0.0, now=now)

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

    def full_until(self, *, now: float) -> float | None:
        """When the sender may go on, or None where it need not wait.

        Infinity where that depends on the other side, which does not read.
        """
        rate = self._settings.rate_bytes_per_s
        if rate is None:
            return math.inf if self.held_bytes >= _UNLIMITED_BOUND_BYTES else None
        queue_bytes: float | None = self._settings.queue_bytes
        if queue_bytes is None:
            queue_bytes = rate * self._settings.queue_s
        queue_bytes = max(_MIN_BOUND_BYTES, queue_bytes)
        if self.held_bytes >= queue_bytes + rate * self._settings.delay_s + _MIN_BOUND_BYTES:
            return math.inf
        not_before = self._wire.free_at - queue_bytes / rate
        return not_before if not_before > now else None

    @property
    def _segment_bytes(self) -> int:
        rate = self._settings.rate_bytes_per_s
        if rate is None:
            return _MAX_SEGMENT_BYTES
        return min(max(int(rate * _SEGMENT_S), _MIN_SEGMENT_BYTES), _MAX_SEGMENT_BYTES)

    def _forgets(self, now: float) -> bool:
        since, limit_s = self._silent_since, self._settings.idle_drop_s
        if limit_s is not None and since is not None and now - since > limit_s:
            self.forgotten = True
        self._silent_since = now
        return self.forgotten

    def _append(self, segment: memoryview | None, *, again_s: float, now: float) -> None:
        due = self._wire.free_at + self._settings.delay_s + self._jitter.at(now) + again_s
        self._last_due = max(self._last_due, due)
        self._line.append((self._last_due, segment))
