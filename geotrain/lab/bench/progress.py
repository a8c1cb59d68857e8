"""A rate from the moments at which pieces of work were done. Pure."""

from collections.abc import Sequence


class Progress:
    """Bytes between the first event at or after `since` and the first at or after `until`.

    Both ends of the span are events, so that a piece half done at a border blurs nothing; and a
    stall at the border is counted to its end, since the span ends with what came after it.
    """

    def __init__(self, *, since: float, until: float) -> None:
        """
        Args:
            since, until: Seconds of any one clock.
        """
        assert since < until
        self._since, self._until = since, until
        self.began_at: float | None = None
        self.ended_at: float | None = None
        self.num_bytes = 0

    def on_bytes(self, nbytes: int, *, now: float) -> None:
        """So many bytes more are done; the event that begins the span is not part of it."""
        if self.ended_at is not None or now < self._since:
            return
        if self.began_at is None:
            self.began_at = now
            return
        self.num_bytes += nbytes
        if now >= self._until:
            self.ended_at = now

    @property
    def bytes_per_s(self) -> float:
        """Only once the span has ended."""
        assert self.began_at is not None and self.ended_at is not None
        return self.num_bytes / (self.ended_at - self.began_at)


def quantiles_ms(samples_s: Sequence[float]) -> dict[str, float | int] | None:
    """min, p50, p99 and the count of samples, in ms; None without any."""
    if not samples_s:
        return None
    ordered = sorted(samples_s)
    at = {name: ordered[round(share * (len(ordered) - 1))] for name, share in _SHARES.items()}
    return {name: round(value * 1e3, 3) for name, value in at.items()} | {"count": len(ordered)}


_SHARES = {"min": 0.0, "p50": 0.5, "p99": 0.99}
