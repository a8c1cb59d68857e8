"""`geotrain demo` as a user runs it: what it prints, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from geotrain.lab.emulator.netns import obstacle
from tests.lab.emulator.remains import is_left

LIMIT_S = 90.0
STEP_KEYS = {
    *("event", "step", "loss", "grad_norm", "num_tokens"),
    *("step_s", "num_microbatches", "windows", "wan_bytes"),
}


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[subprocess.Popen]:
    """The demo with its temporary files in `folder`; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "geotrain", "demo", "--json", *options],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            yield process
            process.kill()
    finally:
        process.kill()


def next_step(process: subprocess.Popen) -> dict:
    """Wait for the next line; the pipe is closed when the demo ends, so this ends too.

    `communicate` then gives what comes later, but not what had come by now.
    """
    text = process.stdout.readline()
    assert text, process.stderr.read()
    return json.loads(text)


def assert_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        while is_left(process):
            assert time.monotonic() < deadline, f"left behind: {process}"
            time.sleep(0.02)


needs_namespaces = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


@pytest.mark.parametrize(
    ("regions", "codec", "rtt_ms", "emulator"),
    [
        (1, "none", 0, "auto"),
        pytest.param(3, "planes", 40, "netns", marks=needs_namespaces),
        (3, "planes", 40, "relay"),
    ],
)
def test_it_trains_what_one_plain_process_trains(tmp_path, regions, codec, rtt_ms, emulator):
    options = ["--regions", str(regions), "--codec", codec, "--rtt-ms", str(rtt_ms)]
    options += ["--emulator", emulator]
    with demo(tmp_path, *options, "--steps", "3", "--microbatches", "4", "--verify") as process:
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
    *steps, summary = [json.loads(line) for line in out.splitlines()]
    assert [set(step) for step in steps] == [STEP_KEYS] * 3
    assert {step["event"] for step in steps} == {"step"}
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[0]["loss"] > steps[-1]["loss"]
    assert steps[0]["windows"] == [4] * (regions - 1) + [1]
    assert all((step["wan_bytes"] > 0) == (regions > 1) for step in steps[1:])
    assert summary["event"] == "summary"
    assert (summary["regions"], summary["steps"]) == (regions, 3)
    assert summary["final_loss"] == steps[-1]["loss"]
    assert summary["max_abs_param_diff"] == 0.0
    assert summary["ideal_s"] >= summary["lower_bound_s"] > 0
    assert summary["step_s"] > 0 and summary["single_process_step_s"] > 0
    assert len(summary["rtt_ms"]) == regions - 1
    for measured in summary["rtt_ms"].values():
        # The delay once each way, not twice; a busy machine adds to it.
        assert rtt_ms <= measured["min"] < 2 * rtt_ms
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status", "emulator"),
    [
        pytest.param(signal.SIGINT, 130, "netns", marks=needs_namespaces),
        (signal.SIGTERM, 143, "relay"),
        pytest.param(signal.SIGKILL, -9, "netns", marks=needs_namespaces),
        (signal.SIGKILL, -9, "relay"),
    ],
)
def test_whatever_ends_it_nothing_is_left(tmp_path, number, status, emulator):
    options = ["--rtt-ms", "5", "--steps", "1000", "--emulator", emulator]
    with demo(tmp_path, *options) as process:
        next_step(process)
        children = psutil.Process(process.pid).children(recursive=True)
        # Two daemons, two training processes, the lab's keeper, and a forwarder each way.
        assert len(children) == (7 if emulator == "netns" else 5)
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status
    assert_gone(children)
    assert list(tmp_path.iterdir()) == []
    if number != signal.SIGKILL:
        assert err == f"geotrain demo: stopped by {number.name}\n"


@pytest.mark.parametrize("role", ["daemon", "training process"])
def test_a_childs_death_ends_it_with_one_named_error(tmp_path, role):
    with demo(tmp_path, "--rtt-ms", "5", "--steps", "1000") as process:
        next_step(process)
        children = psutil.Process(process.pid).children(recursive=True)
        (victim,) = [child for child in children if f"{role} of frankfurt" == role_of(child)]
        victim.kill()
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
    assert err.startswith(f"geotrain demo: {role} of frankfurt was ended by SIGKILL")
    assert_gone(children)
    assert list(tmp_path.iterdir()) == []


def role_of(process: psutil.Process) -> str:
    command = process.cmdline()
    if "daemon" in command:
        return f"daemon of {Path(command[-1]).stem}"
    if not any("run_module('geotrain.lab.demo.train'" in part for part in command):
        return "part of the lab"
    return f"training process of {Path(process.environ()['GEOTRAIN_CONFIG']).stem}"


def test_a_reader_that_goes_away_ends_it(tmp_path):
    with demo(tmp_path, "--regions", "1", "--steps", "1000") as process:
        next_step(process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.stdout.close()
        process.stdout = None
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
    assert_gone(children)
    assert list(tmp_path.iterdir()) == []


def test_a_script_changes_the_links_while_it_trains(tmp_path):
    script = tmp_path / "weather.toml"
    script.write_text("[[change]]\nat_s = 0\nrtt_ms = 400\nwhy = 'a detour'\n")
    folder = tmp_path / "own"
    folder.mkdir()
    options = ["--rtt-ms", "0", "--steps", "1000", "--no-baseline", "--script", str(script)]
    with demo(folder, *options) as process:
        # Training waits for no change, so nobody knows how many steps there are before it; and a
        # busy machine may make one as slow, but not three running.
        slow = 0
        while slow < 3:
            slow = slow + 1 if next_step(process)["step_s"] >= 0.4 else 0
        process.terminate()
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 143
    assert list(folder.iterdir()) == []


def test_a_wrong_script_is_told_before_anything_starts(tmp_path):
    script = tmp_path / "weather.toml"
    script.write_text("[[change]]\nat_s = 0\nspeed = 400\n")
    with demo(tmp_path, "--script", str(script)) as process:
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (2, "")
    assert "change 1: unknown key speed" in err
    assert list(tmp_path.iterdir()) == [script]
