"""`geotrain bench step` as a user runs it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from geotrain.lab.emulator.netns import obstacle
from tests.lab.emulator.remains import MARK, left_behind, look

LIMIT_S = 150.0
FIELDS = {
    *("step_s", "ideal_s", "lower_bound_s", "ratio", "windows", "num_microbatches", "bubble"),
    *("peer_step_s", "speedup", "speedup_stock"),
}
TINY = ["--forward-ms", "2", "--backward-ms", "4", "--boundary-kib", "64"]


NETNS = pytest.mark.skipif(obstacle() is not None, reason=f"no network namespaces: {obstacle()}")


def bench(folder, *options, tiny=True):
    work = [*TINY, "--steps", "3"] if tiny else []
    done = subprocess.run(
        [sys.executable, "-m", "geotrain", "bench", "step", *work, *options],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "geotrain: step 1 of " in done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


def test_it_measures_steps_over_relays(tmp_path):
    options = ["--emulator", "relay", "--rtt-ms", "60", "--microbatches", "8"]
    result = json.loads(bench(tmp_path, *options, "--window", "8,1", "--json"))
    assert set(result) >= FIELDS
    assert (result["windows"], result["num_microbatches"]) == ([8, 1], 8)
    assert result["emulator"] == "relay"
    assert result["ideal_s"] == pytest.approx(7 * 0.006 + 0.012 + 0.06 + 2 * 65536 / 125e6)
    # No upper limit that a busy machine could not break.
    assert result["step_s"] > result["lower_bound_s"]
    assert result["ratio"] == pytest.approx(result["step_s"] / result["ideal_s"])
    assert 0 < result["bubble"] < 1
    assert (result["peer_step_s"], result["speedup"], result["speedup_stock"]) == ({}, None, None)


def test_windows_and_counts_follow_links_that_a_script_changes(tmp_path):
    """From a link shorter than a microbatch to one that no window with room in memory hides."""
    script = tmp_path.parent / f"{tmp_path.name}.toml"
    script.write_text('[[change]]\nat_s = 0\nrtt_ms = 300\nwhy = "a detour"\n')
    options = ["--emulator", "relay", "--rtt-ms", "2", "--script", str(script)]
    options += ["--global-batch", "16", "--overhead-ms", "1", "--sample-ms", "4"]
    options += ["--boundary-kib-per-sample", "16", "--memory-samples", "8"]
    options += ["--window", "auto", "--microbatches", "auto", "--steps", "5"]
    result = json.loads(bench(tmp_path, *options, "--json", tiny=False))
    before, after = result["phases"]
    assert (before["first_step"], before["num_steps"]) == (1, 1)
    assert (after["first_step"], after["num_steps"]) == (2, 4)
    assert "round trip 300 ms (a detour)" in after["change"]
    assert after["step_s"] > after["lower_bound_s"] > before["lower_bound_s"] + 0.29
    assert set(result["all_num_microbatches"]) <= {4, 8, 16}
    assert result["all_windows"][0] == [8, 1], "the first step begins as wide as can be"
    assert {plan["step"] for plan in after["new_plans"]} <= {2, 3, 4, 5}
    measured = result["measured"]
    assert measured["slowest_s"] >= measured["asked_slowest_s"] > 0
    assert measured["ideal_s"] > result["ideal_s"]  # both of the link that the run began with


@NETNS
def test_three_regions_with_unequal_stages_over_links_with_jitter(tmp_path):
    options = ["--regions", "3", "--forward-ms", "2,6,3", "--backward-ms", "4,2,8"]
    options += ["--rtt-ms", "20", "--jitter-ms", "3", "--loss", "0.001", "--microbatches", "6"]
    options += ["--congestion", "cubic"]
    result = json.loads(bench(tmp_path, *options, "--window", "hide", "--json"))
    assert result["windows"] == [6, 6, 1]
    assert result["congestion"] == {"sites": "cubic", "geotrain": "cubic"}
    assert result["step_s"] > result["lower_bound_s"]
    assert result["ideal_s"] == pytest.approx(5 * 0.011 + 0.025 + 4 * (0.01 + 65536 / 125e6))


@NETNS
def test_torch_does_the_same_work_on_the_same_links(tmp_path):
    options = ["--emulator", "netns", "--rtt-ms", "20", "--microbatches", "3"]
    result = json.loads(bench(tmp_path, *options, "--against", "torch", "--json"))
    assert set(result["peer_step_s"]) == {"torch_1f1b", "torch_gpipe", "torch_csv"}
    assert list(result["torch_csv_widths"]) == ["2", "3"]
    for step_s in (*result["peer_step_s"].values(), *result["torch_csv_widths"].values()):
        assert step_s > result["lower_bound_s"]
    assert result["peer_notes"] == {}
    assert result["speedup"] <= result["speedup_stock"]


def wait_for_child(process: subprocess.Popen, module: str) -> None:
    """Until a process that the bench started runs this module."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                # Not the small programs that become it: they carry it further back.
                if f"run_module('{module}'" in " ".join(child.cmdline()[1:4]):
                    return
        time.sleep(0.02)
    raise AssertionError(f"no {module} within {LIMIT_S:.0f} s")


RANK, TORCH_RANK = "geotrain.lab.bench.rank", "geotrain.lab.bench.torch_rank"


@pytest.mark.parametrize(
    ("emulator", "module", "number", "status"),
    [
        ("relay", RANK, signal.SIGINT, 130),
        ("relay", RANK, signal.SIGTERM, 143),
        pytest.param("netns", RANK, signal.SIGKILL, -9, marks=NETNS),
        pytest.param("netns", TORCH_RANK, signal.SIGTERM, 143, marks=NETNS),
    ],
)
def test_whatever_ends_it_nothing_is_left(tmp_path, emulator, module, number, status):
    options = ["--microbatches", "4", "--rtt-ms", "5", "--emulator", emulator]
    options += ["--against", "torch"] if module == TORCH_RANK else ["--steps", "1000"]
    before = look(mark := f"bench-{os.getpid()}-{emulator}-{number}-{module}")
    process = subprocess.Popen(
        [sys.executable, "-m", "geotrain", "bench", "step", *TINY, *options],
        env={**os.environ, "TMPDIR": str(tmp_path), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_child(process, module)
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (status, "")
    if number != signal.SIGKILL:
        assert err.splitlines()[-1] == f"geotrain bench: stopped by {number.name}"
    assert left_behind(before, folder=tmp_path) == []
