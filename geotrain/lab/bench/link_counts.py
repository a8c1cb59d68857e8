"""What one end of a measured link counts, from the moment at which the bulk begins."""

import time
from typing import Any

from geotrain.lab.bench.connections import Retransmissions, own_connections
from geotrain.lab.bench.link_options import Traffic
from geotrain.lab.bench.progress import Progress, quantiles_ms
from geotrain.observability.metrics import LoopLag


class Counts:
    """Payload, CPU time, repeats, loop lag and round trips of this process."""

    def __init__(self, traffic: Traffic, *, sends: bool, receives: bool) -> None:
        self._traffic = traffic
        self._sends, self._receives = sends, receives
        self._sent: Progress | None = None
        self._received: Progress | None = None
        self._handled_bytes = 0
        self._snapshots: list[tuple[float, int, int]] = []
        """CPU seconds, bytes handled and bytes repeated, where the counted span begins and ends."""
        self._retransmissions = Retransmissions()
        self._lag = LoopLag()
        self._idle_s: list[float] = []
        self._loaded_s: list[float] = []

    def begin(self, *, now: float) -> None:
        """Bulk begins; what is counted begins when TCP has come up to speed."""
        since = now + self._traffic.warm_up_s
        until = since + self._traffic.seconds
        if self._sends:
            self._sent = Progress(since=since, until=until)
        if self._receives:
            self._received = Progress(since=since, until=until)

    @property
    def has_begun(self) -> bool:
        return self._sent is not None or self._received is not None

    @property
    def is_counting(self) -> bool:
        return len(self._snapshots) == 1

    @property
    def is_done(self) -> bool:
        """Whether every direction has been counted."""
        progress = [one for one in (self._sent, self._received) if one is not None]
        return self.has_begun and all(one.ended_at is not None for one in progress)

    def on_sent(self, nbytes: int, *, now: float) -> None:
        """Payload that the other end has acknowledged."""
        self._count(self._sent, nbytes, now)

    def on_received(self, nbytes: int, *, now: float) -> None:
        self._count(self._received, nbytes, now)

    def on_round_trip(self, sample_s: float, *, was_idle: bool) -> None:
        """Of a control record that was sent before the bulk began, or after."""
        if was_idle:
            self._idle_s.append(sample_s)
        elif self.is_counting:
            self._loaded_s.append(sample_s)

    def on_lag(self, lag_s: float) -> None:
        if self.is_counting:
            self._lag.on_tick(lag_s)

    def look(self) -> None:
        """Now and then, so that the repeats of a lane that ends are known."""
        self._retransmissions.look()

    def figures(self) -> dict[str, Any]:
        """Plain values, once everything has been counted."""
        (cpu_s, handled, repeated), (cpu_end_s, handled_end, repeated_end) = self._snapshots
        with own_connections() as connections:
            num_connections = len(connections)
        is_known = self._retransmissions.is_known
        return {
            "sent_bytes_per_s": None if self._sent is None else self._sent.bytes_per_s,
            "cpu_s_per_gb": (cpu_end_s - cpu_s) / ((handled_end - handled) / 1e9),
            "retransmitted_bytes": repeated_end - repeated if is_known else None,
            "loop_lag_ms": self._lag.quantiles_ms(),
            "lanes": num_connections,
            "rtt_ms": {"idle": quantiles_ms(self._idle_s), "loaded": quantiles_ms(self._loaded_s)},
        }

    def _count(self, progress: Progress | None, nbytes: int, now: float) -> None:
        if progress is None:
            return
        self._handled_bytes += nbytes
        progress.on_bytes(nbytes, now=now)
        main = self._sent or self._received
        assert main is not None
        begins = main.began_at is not None and not self._snapshots
        ends = main.ended_at is not None and len(self._snapshots) == 1
        if begins or ends:
            seen = (time.process_time(), self._handled_bytes, self._retransmissions.look())
            self._snapshots.append(seen)
