"""A daemon's numbers: the lag of its loop, and its status document as Prometheus metrics."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LAG_INTERVAL_S = 0.05
_LAG_WINDOW_S = 600.0


class LoopLag:
    """How late the event loop ran a timer, over the last ten minutes."""

    def __init__(self) -> None:
        self._lags_s: deque[float] = deque(maxlen=int(_LAG_WINDOW_S / LAG_INTERVAL_S))

    def on_tick(self, lag_s: float) -> None:
        self._lags_s.append(max(0.0, lag_s))

    def quantiles_ms(self) -> dict[str, float]:
        """p50, p99 and the maximum; 0 before the first tick."""
        lags = sorted(self._lags_s) or [0.0]
        last = len(lags) - 1
        at = {"p50": round(last * 0.5), "p99": round(last * 0.99), "max": last}
        return {name: round(lags[index] * 1000, 3) for name, index in at.items()}


class Metrics:
    """`/metrics` of one daemon; nothing global, so that tests can run many in one process."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        """
        Args:
            snapshot: The status document as it is now.
        """
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_StatusCollector(snapshot))

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class _StatusCollector(Collector):
    def __init__(self, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        status = self._snapshot()
        yield _gauge("geotrain_uptime_seconds", "Since the daemon started.", status["uptime_s"])
        yield _gauge("geotrain_memory_rss_bytes", "Resident memory.", status["memory_rss_bytes"])
        lag = GaugeMetricFamily(
            "geotrain_loop_lag_seconds",
            "Lag of the event loop over the last ten minutes.",
            labels=["quantile"],
        )
        for name, label in (("p50", "0.5"), ("p99", "0.99")):
            lag.add_metric([label], status["loop_lag_ms"][name] / 1000)
        yield lag
        yield from _regions(status)
        yield from _ranks(status)
        yield from _links(status)
        yield from _egress(status)
        yield from _steps(status)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _regions(status: Mapping[str, Any]) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "geotrain_region_state", "1 for the state a region is in.", labels=["region", "state"]
    )
    for entry in status["board"]:
        states.add_metric([entry["region"], entry["state"]], 1)
    yield states


def _ranks(status: Mapping[str, Any]) -> Iterator[Metric]:
    step = GaugeMetricFamily("geotrain_rank_step", "Last finished step.", labels=["rank"])
    age = GaugeMetricFamily(
        "geotrain_rank_action_age_seconds", "Since when a rank is in its action.", labels=["rank"]
    )
    for rank in status["ranks"]:
        if isinstance(rank["step"], int):
            step.add_metric([str(rank["rank"])], rank["step"])
        age.add_metric([str(rank["rank"])], rank["action_age_s"])
    yield step
    yield age


def _links(status: Mapping[str, Any]) -> Iterator[Metric]:
    up = GaugeMetricFamily("geotrain_link_up", "1 while connected.", labels=["peer"])
    sent = CounterMetricFamily("geotrain_link_sent_bytes", "On the wire.", labels=["peer"])
    received = CounterMetricFamily("geotrain_link_received_bytes", "On the wire.", labels=["peer"])
    payload = CounterMetricFamily(
        "geotrain_link_sent_payload_bytes", "Sent, as it was before coding.", labels=["peer"]
    )
    rtt = GaugeMetricFamily(
        "geotrain_link_rtt_seconds", "Round trip time.", labels=["peer", "quantile"]
    )
    for peer, link in status["links"].items():
        up.add_metric([peer], float(link.get("state") == "connected"))
        sent.add_metric([peer], link.get("bytes_sent", 0))
        received.add_metric([peer], link.get("bytes_received", 0))
        payload.add_metric([peer], link.get("payload_bytes_sent", 0))
        round_trip = link.get("rtt_s") or {}
        for name, label in (("min", "0"), ("p50", "0.5"), ("p99", "0.99")):
            if isinstance(round_trip.get(name), int | float):
                rtt.add_metric([peer, label], round_trip[name])
    yield from (up, sent, received, payload, rtt)


def _egress(status: Mapping[str, Any]) -> Iterator[Metric]:
    egress = status["egress"]
    yield _gauge("geotrain_egress_today_bytes", "Sent this UTC day.", egress["bytes_today"])
    yield _gauge("geotrain_egress_today_usd", "Cost of this UTC day.", egress["usd_today"])
    yield _gauge("geotrain_egress_usd_per_hour", "Over five minutes.", egress["usd_per_hour"])
    if egress["usd_per_million_tokens"] is not None:
        yield _gauge(
            "geotrain_egress_usd_per_million_tokens",
            "Since the daemon started.",
            egress["usd_per_million_tokens"],
        )


def _steps(status: Mapping[str, Any]) -> Iterator[Metric]:
    steps = status["steps"]
    spent = CounterMetricFamily(
        "geotrain_step_seconds", "Of this region's steps, by what they went into.", labels=["cause"]
    )
    for cause, seconds in steps["total_s"].items():
        spent.add_metric([cause], seconds)
    verdicts = GaugeMetricFamily(
        "geotrain_verdict", "1 for what is off in the run.", labels=["kind", "where"]
    )
    for verdict in steps["verdicts"]:
        verdicts.add_metric([verdict["kind"], verdict["where"]], 1)
    yield from (spent, verdicts)
