"""A path with one bottleneck and an eager sender, in steps of time; for estimators to prove on."""

import random
from collections import deque
from dataclasses import dataclass, field

from geotrain.transport.pacing import Pacing
from geotrain.transport.pings import BUSY_INTERVAL_S

STEP_S = 0.005


@dataclass
class Path:
    """Fluid: what is sent waits in one queue, leaves it at the rate, and is acknowledged."""

    rate: float
    """Bytes per second; may be changed at any time."""
    rtt_s: float
    jitter_s: float = 0.0
    """Deviation of a half-normal extra delay, each way."""
    queue_limit_s: float = 1.0
    others_delay_s: float = 0.0
    """A standing queue that is not ours."""
    backlog: float = float("inf")
    """What there is to send."""
    seed: int = 1
    pacing: Pacing = field(default_factory=Pacing)

    now: float = 0.0
    delivered: float = 0.0
    rtts: list[tuple[float, float]] = field(default_factory=list)
    caps: list[tuple[float, float | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._queue = 0.0
        self._window = 15_000.0
        self._in_flight = 0.0
        self._acks: deque[tuple[float, float]] = deque()
        self._pings: deque[tuple[float, float]] = deque()
        self._recent: list[float] = []
        self._next_ping = 0.0
        self._last_decision = 0.0
        self._delivered_then = 0.0
        self._was_busy = True

    def run(self, seconds: float) -> float:
        """Let time pass; returns the rate at which bytes were delivered, as a part of `rate`."""
        before, end, began = self.delivered, self.now + seconds, self.now
        while self.now < end:
            self._step()
        return (self.delivered - before) / (self.now - began) / self.rate

    def loaded_delay_s(self, fraction: float, *, since: float) -> float:
        """A quantile of how much longer than the empty path round trips were."""
        late = sorted(rtt_s - self.rtt_s for at, rtt_s in self.rtts if at >= since)
        return late[min(int(fraction * len(late)), len(late) - 1)]

    def _step(self) -> None:
        self.now += STEP_S
        self._send()
        served = min(self._queue, self.rate * STEP_S)
        self._queue -= served
        self._acks.append((self.now + self.rtt_s, served))
        while self._acks and self._acks[0][0] <= self.now:
            acked = self._acks.popleft()[1]
            self._in_flight -= acked
            self.delivered += acked
            self._window = min(self._window + acked, 4 * self.rate * max(self.rtt_s, 0.02))
        self._ping()
        if self.now - self._last_decision >= self.pacing.interval_s:
            self._decide()

    def _send(self) -> None:
        cap = self.pacing.cap_bytes_per_s
        room = self._window - self._in_flight
        sent = max(0.0, min(room, self.backlog, float("inf") if cap is None else cap * STEP_S))
        self._was_busy = self._was_busy and self.backlog > sent
        self.backlog -= sent
        taken = min(sent, self.rate * self.queue_limit_s - self._queue)
        self.backlog += sent - taken  # a full queue drops, and what is dropped comes again
        self._queue += taken
        self._in_flight += taken

    def _ping(self) -> None:
        if self.now >= self._next_ping:
            self._next_ping = self.now + BUSY_INTERVAL_S
            rtt_s = self.rtt_s + self._queue / self.rate + self.others_delay_s
            rtt_s += abs(self._rng.gauss(0, self.jitter_s)) + abs(self._rng.gauss(0, self.jitter_s))
            # Order is kept: none overtakes the one before it.
            arrives = max(self.now + rtt_s, self._pings[-1][0] if self._pings else 0.0)
            self._pings.append((arrives, arrives - self.now))
        while self._pings and self._pings[0][0] <= self.now:
            at, rtt_s = self._pings.popleft()
            self._recent.append(rtt_s)
            self.rtts.append((at, rtt_s))

    def _decide(self) -> None:
        waiting_s = self.now - (self._pings[0][0] - self._pings[0][1]) if self._pings else 0.0
        cap, _ = self.pacing.on_interval(
            rtts_s=self._recent,
            delivered_bytes=int(self.delivered - self._delivered_then),
            elapsed_s=self.now - self._last_decision,
            busy=self._was_busy,
            waiting_s=waiting_s,
        )
        self.caps.append((self.now, cap))
        self._recent, self._delivered_then = [], self.delivered
        self._last_decision, self._was_busy = self.now, True
