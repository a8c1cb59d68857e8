"""What the links cost: bytes sent times the price, per hour, per token and per UTC day. Pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTES_PER_GB = 1e9
_RATE_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Of one UTC day."""

    day: str
    bytes: int
    usd: float


class EgressMeter:
    """Counts the bytes of all links of this site."""

    def __init__(
        self,
        usd_per_gb: Mapping[str, float],
        limit_usd_per_day: float | None,
        *,
        earlier: Spent | None = None,
    ) -> None:
        """
        Args:
            earlier: What daemons before this one have spent.
        """
        self._usd_per_gb = dict(usd_per_gb)
        self._limit_usd_per_day = limit_usd_per_day
        self._seen: dict[str, int] = {}
        self._usd = 0.0
        self._tokens = 0.0
        self._day = earlier.day if earlier is not None else ""
        self._bytes_today = earlier.bytes if earlier is not None else 0
        self._usd_today = earlier.usd if earlier is not None else 0.0
        self._history: deque[tuple[float, float]] = deque()

    def on_bytes(self, bytes_sent: Mapping[str, int], *, now: float, day: str) -> None:
        """
        Args:
            bytes_sent: Peer -> bytes sent to it since this daemon started.
            now: Monotonic seconds.
            day: The UTC date.
        """
        if day != self._day:
            self._day, self._bytes_today, self._usd_today = day, 0, 0.0
        for peer, total in bytes_sent.items():
            new_bytes = total - self._seen.get(peer, 0)
            self._seen[peer] = total
            usd = new_bytes / _BYTES_PER_GB * self._usd_per_gb.get(peer, 0.0)
            self._bytes_today += new_bytes
            self._usd_today += usd
            self._usd += usd
        self._history.append((now, self._usd))
        while now - self._history[0][0] > _RATE_WINDOW_S:
            self._history.popleft()

    def on_tokens(self, num_tokens: float) -> None:
        self._tokens += num_tokens

    @property
    def spent(self) -> Spent:
        return Spent(day=self._day, bytes=self._bytes_today, usd=self._usd_today)

    @property
    def stop_reason(self) -> str | None:
        """Why the run must stop, or None."""
        limit = self._limit_usd_per_day
        if limit is None or self._usd_today < limit:
            return None
        return (
            f"egress of {self._usd_today:.4g} USD today reached "
            f"limits.egress_usd_per_day = {limit:g}"
        )

    def summary(self) -> dict[str, Any]:
        usd_per_hour = 0.0
        if len(self._history) > 1:
            (since, usd_then), (now, usd_now) = self._history[0], self._history[-1]
            if now > since:
                usd_per_hour = (usd_now - usd_then) / (now - since) * 3600
        return {
            "bytes_today": self._bytes_today,
            "usd_today": self._usd_today,
            "usd_per_hour": usd_per_hour,
            "usd_per_million_tokens": self._usd / self._tokens * 1e6 if self._tokens else None,
            "limit_usd_per_day": self._limit_usd_per_day,
        }
