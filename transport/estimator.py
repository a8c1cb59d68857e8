"""What a link shows of itself: round-trip time and rate. Pure; time comes in as an argument."""

from collections import deque

from geotrain.transport.frame import MAX_CHUNK_BYTES

RTT_SAMPLES = 256
MIN_CHUNK_BYTES = 16 * 1024
FIRST_CHUNK_BYTES = 256 * 1024
CHUNK_S = 0.005
"""A control frame waits for one chunk at most, so a chunk lasts about this long."""

UNSENT_S = 0.002
"""What waits in the kernel delays a control frame, and too little of it costs a wake-up each."""
FIRST_UNSENT_BYTES = 128 * 1024


class RttEstimator:
    """Round-trip time over the last RTT_SAMPLES pings."""

    def __init__(self) -> None:
        self._samples_s: deque[float] = deque(maxlen=RTT_SAMPLES)
        self.min_s: float | None = None
        """The least ever seen on this link: the path without queues."""
        self.last_s: float | None = None

    def on_sample(self, rtt_s: float) -> None:
        self._samples_s.append(rtt_s)
        self.last_s = rtt_s
        if self.min_s is None or rtt_s < self.min_s:
            self.min_s = rtt_s

    def quantile_s(self, fraction: float) -> float | None:
        """The sample below which `fraction` of the recent ones lie; None before the first."""
        if not self._samples_s:
            return None
        ordered = sorted(self._samples_s)
        return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]

    def summary(self) -> dict[str, float | None]:
        quantiles = {"p50": self.quantile_s(0.5), "p99": self.quantile_s(0.99)}
        return {"min": self.min_s, **quantiles, "last": self.last_s}


class RateEstimator:
    """Bytes per second while bytes flow: idle time between bursts does not count.

    A burst is a run of bytes without a gap longer than `idle_s`, up to `end_burst`. Buffers carry
    short bursts, which say nothing of the path, so a sample needs `sample_s` of flow.
    """

    def __init__(self, *, idle_s: float = 0.25, sample_s: float = 0.05, weight: float = 0.25):
        self._idle_s = idle_s
        self._sample_s = sample_s
        self._weight = weight
        self._began: float | None = None
        self._last = 0.0
        self._bytes = 0
        self.rate_bytes_per_s: float | None = None

    def on_bytes(self, nbytes: int, *, now: float) -> None:
        if self._began is None or now - self._last > self._idle_s:
            # The first bytes of a burst only start its clock: when they left is not known.
            self._began, self._last, self._bytes = now, now, 0
            return
        self._last = now
        self._bytes += nbytes
        elapsed_s = now - self._began
        if elapsed_s >= self._sample_s:
            rate = self._bytes / elapsed_s
            known = self.rate_bytes_per_s
            self.rate_bytes_per_s = rate if known is None else known + self._weight * (rate - known)
            self._began, self._bytes = now, 0

    def end_burst(self) -> None:
        """There is nothing more to send for now; the pause that follows is not the path's."""
        self._began = None


def chunk_bytes(rate_bytes_per_s: float | None) -> int:
    """How much payload to put into one chunk: about CHUNK_S of the rate, in whole 4 KiB."""
    if rate_bytes_per_s is None:
        return FIRST_CHUNK_BYTES
    wanted = int(rate_bytes_per_s * CHUNK_S) // 4096 * 4096
    return min(max(wanted, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def unsent_bytes(rate_bytes_per_s: float | None) -> int:
    """How much may wait in the kernel unsent: about UNSENT_S of the rate."""
    if rate_bytes_per_s is None:
        return FIRST_UNSENT_BYTES
    return min(max(int(rate_bytes_per_s * UNSENT_S), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
