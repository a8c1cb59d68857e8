"""Which of two bulk lanes carries, so that neither does while BBR probes it. Pure.

Linux's BBR wants to see the path without a queue. Where it has met no shorter round trip of a
connection for 10 s it lets no more than four packets be under way for 200 ms and a round trip
(PROBE_RTT), and what is to be sent waits. It does without where the connection then starts from
rest: the first acknowledgement tells as much. So one lane carries while the other rests until its
round trip has expired; then they change places, and the one that carries has 10 s again. What it
knows of the path's rate, and its window, BBR keeps while a lane rests.

Pings may go on: from a lone small packet BBR takes no longer round trip, since the acknowledgement
may have been held back. So they neither renew what has expired nor bring a probe; where they do
(two at once), it is seen here as any change is.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from geotrain.transport.carrier import KernelCounts

EXPIRES_S = 10.0
"""Of BBR's shortest round trip; the kernel has no setting for it."""
MARGIN_S = 0.05
"""For the kernel's clock, which ticks every few milliseconds. Seen late, a renewal counts late."""
SEEN_LATE_S = 0.5
"""Kernels are asked a few times a second, so a renewal may be so much older than it seems."""
EARLY_S = 5.0
"""A lane carries at least so long: the other one has then rested half of its time."""
LATE_S = EXPIRES_S - SEEN_LATE_S
LATER_S = 0.2
"""A lane that has not expired takes over if it expires so much later: by then the other one will
have rested and expired."""
WARM_BYTES = 1 << 20
"""Before so much was acknowledged on each, both carry: a lane's first bytes are slow."""
WARM_SHARE = 0.3
"""And until the one whose rate BBR takes for lower has so much of the other's: over a long path it
takes seconds to find, and no lane finds it at rest. (Two that share a path see half of it each.)"""
REST_PINGS = 5
"""A lane that rests is pinged so many times less often: it stays expired, and so ready, longer."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    min_rtt_us: int
    noted_s: float
    """When it was last seen to be another one."""
    is_probed: bool


class Turns:
    """Of one link's bulk lanes, for what this side sends."""

    def __init__(self) -> None:
        self.carrying: int | None = None
        """The lane whose turn it is; None: all carry."""
        self._seen: dict[int, _Seen] = {}

    def may_carry(self, number: int) -> bool:
        return self.carrying is None or number == self.carrying

    def on_counts(self, counts: Mapping[int, KernelCounts], *, now: float) -> None:
        """Note what the kernel tells of all lanes that can carry; several times a second.

        Args:
            counts: By lane; empty where all are needed at once.
        """
        if len(counts) != 2 or any(each.bbr is None for each in counts.values()):
            self.stop()
            return
        self._seen = {number: self._look(number, each, now) for number, each in counts.items()}
        if self.carrying not in counts:
            self.carrying = None
            if _are_warm(counts.values()):
                # The one that rests must expire before the one that carries.
                self.carrying = max(counts, key=lambda number: self._seen[number].noted_s)

    def is_due(self, *, now: float) -> bool:
        """Whether the lanes should change places with the next bytes."""
        if self.carrying is None:
            return False
        mine, other = self._seen[self.carrying], self._seen[self._resting]
        if other.is_probed:
            return False
        age_s = now - mine.noted_s
        if self._has_expired(other, now):
            return age_s >= EARLY_S or mine.is_probed
        if now - other.noted_s >= LATE_S:
            return False
        return mine.is_probed or (age_s >= LATE_S and other.noted_s >= mine.noted_s + LATER_S)

    def turn(self, counts: Mapping[int, KernelCounts], *, now: float) -> bool:
        """Change places if that is due; only when something is sent at once.

        Args:
            counts: As of now.

        Returns:
            Whether they did.
        """
        self.on_counts(counts, now=now)
        if not self.is_due(now=now):
            return False
        resting = self._resting
        told = counts[resting].bbr
        assert told is not None
        if self._has_expired(self._seen[resting], now):
            if not told.is_idle:
                # Not a start from rest: the acknowledgement of what is under way would bring the
                # probe.
                return False
            self._seen[resting].noted_s = now
        self.carrying = resting
        return True

    def stop(self) -> None:
        """All lanes carry."""
        self.carrying = None
        self._seen.clear()

    @property
    def _resting(self) -> int:
        return next(number for number in self._seen if number != self.carrying)

    def _look(self, number: int, counts: KernelCounts, now: float) -> _Seen:
        told, before = counts.bbr, self._seen.get(number)
        assert told is not None
        is_same = before is not None and before.min_rtt_us == told.min_rtt_us
        # The end of a probe renews it, too, even if the round trip is the same.
        noted_s = before.noted_s if before is not None and is_same and not told.is_probed else now
        return _Seen(min_rtt_us=told.min_rtt_us, noted_s=noted_s, is_probed=told.is_probed)

    @staticmethod
    def _has_expired(seen: _Seen, now: float) -> bool:
        return now - seen.noted_s >= EXPIRES_S + MARGIN_S


def _are_warm(counts: Collection[KernelCounts]) -> bool:
    """Whether either of two lanes can carry alone as well as the other."""
    rates = [each.bbr.rate_bytes_s for each in counts if each.bbr is not None]
    has_carried = all(each.acked_bytes >= WARM_BYTES for each in counts)
    return has_carried and min(rates) >= WARM_SHARE * max(rates)
