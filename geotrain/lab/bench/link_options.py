"""What `geotrain bench link` was asked for, and what follows from it without running anything."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from geotrain.lab.settings import LinkSettings
from geotrain.transport.congestion import AUTO

REAL_WINDOW_BYTES = 128 << 20
"""Of a real link, of which nothing is known: 1 Gbit/s over half a second, twice over."""
_LEAST_WINDOW_BYTES = 32 << 20
_MOST_WINDOW_BYTES = 1 << 30
_QUEUE_S = 0.3
"""What TCP may keep in a path's queue on top of the round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is sent and when; the two ends of a link must have the same."""

    message_bytes: int
    window_bytes: int
    """Of payload under way, at most: so much memory each way, at each end."""
    both_ways: bool
    idle_s: float
    """Control records alone, at first."""
    warm_up_s: float
    """Of bulk, while TCP comes up to speed; not counted."""
    seconds: float
    """Counted."""
    congestion: str
    """Of every lane, as `[site.link] congestion` says it; of real sites each has its own."""
    lanes: int | None
    """For bulk, beside the one for control; None leaves it to the link."""

    @property
    def num_slots(self) -> int:
        return max(2, self.window_bytes // self.message_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPlan:
    """What the process at one end of the link needs to know."""

    region: str
    index: int
    """0 leads: it says when, and measures the round trips."""
    peer: str
    url: str | None
    """Where the peer listens; None where it dials."""
    host: str
    port: int
    """Where this end listens; port 0 takes a free one."""
    run_id: str
    run: Mapping[str, Any]
    """The [run] section that both must have."""
    traffic: Traffic
    tls: Mapping[str, str] | None
    """The files of this end's [site.tls]; None: the link is not encrypted."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{**fields, "traffic": Traffic(**fields["traffic"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBench:
    """One call of `geotrain bench link`; with `config` over a real link, else over the lab."""

    rtt_s: float = 0.1
    mbit: float | None = 1000.0
    """None: as fast as this machine."""
    loss: float = 0.0
    jitter_s: float = 0.0
    lanes: int | None = None
    congestion: str | None = None
    message_bytes: int = 1 << 20
    seconds: float = 10.0
    both_ways: bool = False
    emulator: Literal["auto", "netns", "relay"] = "auto"
    tls: bool = True
    """Of the lab, with throw-away certificates; a real link has what its sites have."""
    config: str | None = None
    peer: str | None = None
    json: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The first one dials, leads, and sends where only one does."""
        return ("virginia", "frankfurt")

    @property
    def is_emulated(self) -> bool:
        """Whether anything is emulated; without, both ends talk over the loopback."""
        return self.rtt_s > 0 or self.mbit is not None or self.loss > 0 or self.jitter_s > 0

    @property
    def rate_bytes_per_s(self) -> float | None:
        return None if self.mbit is None else self.mbit * 1e6 / 8

    @property
    def link(self) -> LinkSettings:
        """Every direction of the link."""
        return LinkSettings.from_round_trip(
            self.rtt_s,
            rate_bytes_per_s=self.rate_bytes_per_s,
            jitter_s=self.jitter_s,
            loss=self.loss,
        )

    @property
    def traffic(self) -> Traffic:
        if self.config is not None:
            window_bytes, rtt_s = REAL_WINDOW_BYTES, 0.1
        else:
            window_bytes, rtt_s = self._window_bytes(), self.rtt_s
        return Traffic(
            message_bytes=self.message_bytes,
            window_bytes=window_bytes,
            both_ways=self.both_ways,
            idle_s=0.5 + 10 * rtt_s,
            # A window that doubles each round trip is at 1 Gbit/s x 300 ms after 13 of them.
            warm_up_s=0.5 + 20 * rtt_s,
            seconds=self.seconds,
            congestion=self.congestion or AUTO,
            lanes=self.lanes,
        )

    def _window_bytes(self) -> int:
        """Twice what the path and its queue hold, so that memory is not measured."""
        in_flight = (self.rate_bytes_per_s or 0.0) * (self.rtt_s + _QUEUE_S)
        wanted = int(2 * in_flight) + 4 * self.message_bytes
        return min(max(wanted, _LEAST_WINDOW_BYTES), _MOST_WINDOW_BYTES)

    def plan(
        self,
        index: int,
        *,
        url: str | None,
        host: str,
        port: int,
        tls: Mapping[str, str] | None = None,
    ) -> EndPlan:
        """Of one end in the lab."""
        return EndPlan(
            region=self.names[index],
            index=index,
            peer=self.names[1 - index],
            url=url,
            host=host,
            port=port,
            run_id="bench",
            run={},
            traffic=self.traffic,
            tls=tls,
        )
