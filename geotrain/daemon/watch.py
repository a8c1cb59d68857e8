"""What the daemon looks at once a second: silence, links that stay down, money.

Decides with what it is given; the loop in main.py has the clock.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from geotrain.configuration.site_table import LivenessConfig
from geotrain.daemon.attachments import Attachments
from geotrain.daemon.egress import EgressMeter
from geotrain.daemon.exchange import Exchange

TICK_S = 1.0


class WatchedLink(Protocol):
    def stats(self) -> dict[str, Any]: ...


class Watch:
    """One per daemon."""

    def __init__(
        self,
        *,
        exchange: Exchange,
        attachments: Attachments,
        links: Mapping[str, WatchedLink],
        egress: EgressMeter,
        liveness: LivenessConfig,
        now: float,
    ) -> None:
        self._exchange = exchange
        self._attachments = attachments
        self._links = links
        self._egress = egress
        self._wait_s = liveness.wait_s
        self._give_up_at = now + liveness.silent_s
        """A rank that an earlier daemon had looks for us all the time, so by then it has come."""
        self._down_since: dict[str, float] = {}
        self._counted_tokens = 0.0

    def tick(self, *, now: float, day: str) -> None:
        """
        Args:
            now: Monotonic seconds.
            day: The UTC date, for the daily limit.
        """
        stats = {peer: link.stats() for peer, link in self._links.items()}
        for rank in self._attachments.ranks.values():
            self._exchange.note(rank.liveness.note(now))
        if now >= self._give_up_at:
            self._exchange.give_up_earlier()
        self._watch_links(stats, now)
        self._count_egress(stats, now, day)
        self._tell_ranks(stats)

    def tell_links(self) -> None:
        """Something changed at a link: ranks need not wait for the tick to hear of it."""
        self._tell_ranks({peer: link.stats() for peer, link in self._links.items()})

    def _tell_ranks(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        # Ranks show a link as a whole; its lanes are for the status page.
        links = {
            peer: {name: value for name, value in numbers.items() if name != "lanes"}
            for peer, numbers in stats.items()
        }
        for rank in self._attachments.ranks.values():
            # To a rank that does not read, the newest numbers are enough, later.
            if not rank.server.is_blocked:
                rank.server.post({"type": "links", "links": links})

    def _watch_links(self, stats: Mapping[str, Mapping[str, Any]], now: float) -> None:
        for peer, numbers in stats.items():
            if numbers["state"] == "connected":
                self._down_since.pop(peer, None)
                continue
            down_s = now - self._down_since.setdefault(peer, now)
            if down_s >= self._wait_s and self._exchange.view is not None:
                reason = numbers.get("reason") or numbers["state"]
                self._exchange.fail(
                    "link",
                    f"the link to region {peer} is down for {down_s:.0f} s ({reason}), longer "
                    "than liveness.wait_s; restart all regions once it is back",
                )

    def _count_egress(self, stats: Mapping[str, Mapping[str, Any]], now: float, day: str) -> None:
        sent = {peer: int(numbers["bytes_sent"]) for peer, numbers in stats.items()}
        self._egress.on_bytes(sent, now=now, day=day)
        num_tokens = self._exchange.reports.num_tokens
        self._egress.on_tokens(num_tokens - self._counted_tokens)
        self._counted_tokens = num_tokens
        reason = self._egress.stop_reason
        if reason is not None:
            self._exchange.stop(reason)
        else:
            self._exchange.allow()
