"""`geotrain bench link` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Regions, RunSpec

from geotrain.lab.certificates import make_certificates
from geotrain.lab.emulator.netns import obstacle
from tests.daemon.daemons import tls_table
from tests.free_ports import free_ports

LIMIT_S = 120.0
FIELDS = {
    *("mbit_s", "utilisation", "lanes", "cpu_s_per_gb", "rtt_ms", "retransmitted_bytes"),
    *("loop_lag_ms_p99", "congestion", "directions", "tls"),
}
needs_namespaces = pytest.mark.skipif(
    obstacle() is not None, reason=f"no network namespaces: {obstacle()}"
)


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "geotrain", "bench", "link", "--seconds", "0.5", "--json", *options],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def bench(folder: Path, *options: str) -> dict:
    process = start(folder, *options)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert list(folder.iterdir()) == []
    return json.loads(out)


def check(result: dict, *, rtt_ms: float, directions: int) -> None:
    """No upper limit that a busy machine could not break."""
    assert set(result) >= FIELDS
    assert len(result["directions"]) == directions
    assert all(one["mbit_s"] > 0 for one in result["directions"].values())
    assert result["mbit_s"] == min(one["mbit_s"] for one in result["directions"].values())
    for part in ("idle", "loaded"):
        quantiles = result["rtt_ms"][part]
        assert quantiles["count"] > 0
        assert rtt_ms <= quantiles["min"] <= quantiles["p50"] <= quantiles["p99"]
    assert result["cpu_s_per_gb"] > 0
    assert result["lanes"] >= 1


def test_one_way_over_a_relay(tmp_path):
    options = ["--emulator", "relay", "--rtt-ms", "10", "--mbit", "50", "--message-mib", "0.1"]
    result = bench(tmp_path, *options)
    check(result, rtt_ms=10.0, directions=1)
    assert result["emulator"] == "relay"
    assert result["tls"].startswith("TLSv1.3, ") and result["asked"]["tls"]
    assert result["utilisation"] == pytest.approx(result["mbit_s"] / 50, abs=1e-3)


@needs_namespaces
def test_both_ways_between_namespaces_under_the_congestion_control_asked_for(tmp_path):
    options = ["--emulator", "netns", "--rtt-ms", "10", "--mbit", "200", "--both-ways"]
    result = bench(tmp_path, *options, "--congestion", "cubic", "--no-tls")
    check(result, rtt_ms=10.0, directions=2)
    assert result["congestion"] == {"sites": "cubic", "link": "cubic"}
    assert result["retransmitted_bytes"] >= 0
    assert result["tls"] == "no" and not result["asked"]["tls"]


def site(regions: Regions, name: str, *, listen: str, peer: str, url: str | None) -> Path:
    text = regions._toml(name, peers={peer: url})
    regions.config(name).write_text(text.replace("127.0.0.1:0", listen, 1))
    return regions.config(name)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_real_link_is_measured_by_both_its_sites(tmp_path, tls):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with Regions(tmp_path / "sites", RunSpec()) as regions:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        scheme = "https" if tls else "http"
        first = site(regions, "r0", listen="127.0.0.1:0", peer="r1", url=f"{scheme}://{address}")
        second = site(regions, "r1", listen=address, peer="r0", url=None)
        if tls:
            make_certificates(first.parent, ["r0", "r1"])
            for file in (first, second):
                file.write_text(file.read_text() + tls_table(file.stem))
        processes = [
            start(temporary, "--config", str(first), "--peer", "r1"),
            start(temporary, "--config", str(second), "--peer", "r0"),
        ]
        results = []
        for process in processes:
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, err
            results.append(json.loads(out))
    for result in results:
        check(result, rtt_ms=0.0, directions=1)
        assert result["tls"].startswith("TLSv1.3, " if tls else "no")
        assert list(result["directions"]) == ["r0 to r1"]
    assert results[0]["mbit_s"] == results[1]["mbit_s"]


def test_a_daemon_at_the_other_end_is_named(tmp_path):
    with Regions(tmp_path, RunSpec()) as regions:
        second = site(regions, "r1", listen="127.0.0.1:0", peer="r0", url=None)
        daemon = regions.start_daemon("r1")
        url = f"http://{regions.ports['r1']['listen']}"
        first = site(regions, "r0", listen="127.0.0.1:0", peer="r1", url=url)
        process = start(tmp_path, "--config", str(first), "--peer", "r1")
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        assert "run.bench is " in err
        assert "Run `geotrain bench link --config FILE --peer r0` in region r1, in place" in err
        process = start(tmp_path, "--config", str(second), "--peer", "r0")
        _, err = process.communicate(timeout=LIMIT_S)
        assert f"another daemon already serves this region (pid {daemon.pid}" in err
