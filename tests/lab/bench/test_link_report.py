import pytest

from geotrain.lab.bench.link_options import LinkBench
from geotrain.lab.bench.link_report import report, table


def end(**changes):
    quantiles = {"min": 100.0, "p50": 101.0, "p99": 120.0, "count": 50}
    return {
        "sent_bytes_per_s": None,
        "cpu_s_per_gb": 1.0,
        "retransmitted_bytes": 1000,
        "loop_lag_ms": {"p50": 0.1, "p99": 2.0, "max": 3.0},
        "lanes": 1,
        "congestion": ["bbr"],
        "tls": "TLSv1.3, TLS_AES_256_GCM_SHA384",
        "rtt_ms": {"idle": quantiles, "loaded": quantiles},
        **changes,
    }


def made(options, first, second):
    figures = {"virginia": first, "frankfurt": second}
    return report(
        options, figures, emulator="netns", sites_congestion="cubic", load=1.0, num_cpus=2
    )


def test_one_way():
    result = made(
        LinkBench(mbit=1000.0),
        end(sent_bytes_per_s=115e6),
        end(loop_lag_ms={"p50": 0.1, "p99": 7.0, "max": 9.0}, rtt_ms=None),
    )
    assert (result["mbit_s"], result["utilisation"]) == (920.0, 0.92)
    assert list(result["directions"]) == ["virginia to frankfurt"]
    assert result["cpu_s_per_gb"] == 2.0
    assert result["retransmitted_bytes"] == 2000
    assert result["loop_lag_ms_p99"] == 7.0
    assert result["rtt_ms"]["loaded"]["p99"] == 120.0
    assert result["congestion"] == {"sites": "cubic", "link": "bbr"}
    for text in ("920.0 Mbit/s  92.0% of the rate", "p99 120.0 ms", "100 ms round trip"):
        assert text in table(result)


def test_both_ways_the_slower_direction_is_the_figure():
    options = LinkBench(mbit=500.0, both_ways=True)
    result = made(options, end(sent_bytes_per_s=60e6), end(sent_bytes_per_s=50e6))
    assert (result["mbit_s"], result["utilisation"]) == (400.0, 0.8)
    assert result["directions"]["virginia to frankfurt"]["mbit_s"] == 480.0
    assert "frankfurt to virginia" in table(result)


@pytest.mark.parametrize(
    "options",
    [LinkBench(mbit=None, rtt_s=0.0), LinkBench(config="site.toml", peer="frankfurt")],
)
def test_without_a_rate_asked_for_there_is_no_share(options):
    result = made(options, end(sent_bytes_per_s=1e9), end(retransmitted_bytes=None))
    assert result["utilisation"] is None
    assert result["retransmitted_bytes"] is None
    assert "of the rate" not in table(result)
