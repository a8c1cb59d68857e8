"""Loop lag, and the status document as Prometheus text."""

from typing import Any

from geotrain.observability.metrics import LoopLag, Metrics


def make_status(**changes: Any) -> dict[str, Any]:
    link = {
        "state": "connected",
        "bytes_sent": 5,
        "bytes_received": 6,
        "payload_bytes_sent": 8,
        "rtt_s": {"min": 0.1, "p50": None, "p99": 0.3},
    }
    status: dict[str, Any] = {
        "uptime_s": 1.5,
        "memory_rss_bytes": 1000,
        "loop_lag_ms": {"p50": 1.0, "p99": 20.0},
        "board": [{"region": "a", "state": "ready"}],
        "ranks": [{"rank": 0, "step": None, "action_age_s": 2.0}],
        "links": {"b": link},
        "egress": {
            "bytes_today": 7,
            "usd_today": 0.5,
            "usd_per_hour": 0.25,
            "usd_per_million_tokens": None,
        },
        "steps": {
            "total_s": {"compute": 12.5, "link_delay": 0.5},
            "regions_s": {},
            "verdicts": [{"kind": "link", "where": "a -> b", "text": "link a -> b 4.1x"}],
        },
    }
    return {**status, **changes}


def test_quantiles_are_zero_before_the_first_tick_and_late_ticks_count() -> None:
    lag = LoopLag()
    assert lag.quantiles_ms() == {"p50": 0.0, "p99": 0.0, "max": 0.0}
    for index in range(101):
        lag.on_tick(index / 1000)
    lag.on_tick(-0.001)
    assert lag.quantiles_ms() == {"p50": 49.0, "p99": 99.0, "max": 100.0}


def test_lag_forgets_what_is_older_than_ten_minutes() -> None:
    lag = LoopLag()
    lag.on_tick(5.0)
    for _ in range(12_000):
        lag.on_tick(0.001)
    assert lag.quantiles_ms()["max"] == 1.0


def test_the_text_has_every_number_that_is_known_and_none_that_is_not() -> None:
    lines = Metrics(make_status).text().decode().splitlines()
    for line in (
        "geotrain_uptime_seconds 1.5",
        'geotrain_loop_lag_seconds{quantile="0.99"} 0.02',
        'geotrain_region_state{region="a",state="ready"} 1.0',
        'geotrain_rank_action_age_seconds{rank="0"} 2.0',
        'geotrain_link_up{peer="b"} 1.0',
        'geotrain_link_sent_bytes_total{peer="b"} 5.0',
        'geotrain_link_sent_payload_bytes_total{peer="b"} 8.0',
        'geotrain_link_rtt_seconds{peer="b",quantile="0.99"} 0.3',
        "geotrain_egress_usd_per_hour 0.25",
        'geotrain_step_seconds_total{cause="link_delay"} 0.5',
        'geotrain_verdict{kind="link",where="a -> b"} 1.0',
    ):
        assert line in lines
    text = "\n".join(lines)
    assert 'geotrain_rank_step{rank="0"}' not in text
    assert 'quantile="0.5"} None' not in text
    assert "geotrain_egress_usd_per_million_tokens" not in text
