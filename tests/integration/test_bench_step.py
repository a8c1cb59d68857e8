"""`geotrain bench step` as a user runs it."""

import json
import os
import subprocess
import sys

import pytest

from geotrain.lab.emulator.netns import obstacle

LIMIT_S = 90.0
FIELDS = {
    *("step_s", "ideal_s", "lower_bound_s", "ratio", "windows", "num_microbatches", "bubble"),
    *("peer_step_s", "speedup", "speedup_stock"),
}
TINY = ["--forward-ms", "2", "--backward-ms", "4", "--boundary-kib", "64", "--steps", "3"]


def bench(folder, *options):
    done = subprocess.run(
        [sys.executable, "-m", "geotrain", "bench", "step", *TINY, *options],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
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


def test_windows_follow_the_links_by_themselves(tmp_path):
    """A link much longer than a microbatch: within two steps the window is all there is."""
    options = ["--emulator", "relay", "--rtt-ms", "300", "--microbatches", "6"]
    result = json.loads(bench(tmp_path, *options, "--window", "auto", "--json"))
    assert result["windows"][0] > 2, result
    assert result["all_step_s"][-1] > result["lower_bound_s"]


@pytest.mark.skipif(obstacle() is not None, reason=f"no network namespaces: {obstacle()}")
def test_torch_does_the_same_work_on_the_same_links(tmp_path):
    options = ["--emulator", "netns", "--rtt-ms", "20", "--microbatches", "3"]
    result = json.loads(bench(tmp_path, *options, "--against", "torch", "--json"))
    assert set(result["peer_step_s"]) == {"torch_1f1b", "torch_gpipe", "torch_csv"}
    assert list(result["torch_csv_widths"]) == ["2", "3"]
    for step_s in (*result["peer_step_s"].values(), *result["torch_csv_widths"].values()):
        assert step_s > result["lower_bound_s"]
    assert result["peer_notes"] == {}
    assert result["speedup"] <= result["speedup_stock"]
