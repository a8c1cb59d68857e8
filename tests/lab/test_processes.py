"""Children end with their parent, however it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from geotrain.lab.processes import isolated_module, own_module, start_child, tethered
from geotrain.version import __version__
from tests.lab.emulator.remains import is_left

LIMIT_S = 30.0
FOREVER = "import signal; print('up', flush=True); signal.pause()"

PARENT = """\
import subprocess, sys, os, signal
from geotrain.lab.processes import tethered
child = subprocess.Popen(
    tethered([sys.executable, "-c", sys.argv[1]], parent_pid=os.getpid()), stdout=subprocess.PIPE
)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_a_child_ends_when_its_parent_is_killed(number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, FOREVER], stdout=subprocess.PIPE, text=True
    )
    with parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        parent.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while is_left(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def test_a_child_whose_parent_has_gone_does_not_begin():
    command = tethered([sys.executable, "-c", "print('began')"], parent_pid=1)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "parent ended" in done.stderr


async def started(folder: Path, code: str):
    return await start_child(
        [sys.executable, "-c", code], name="probe", log=folder / "log", environment=os.environ
    )


async def test_the_end_of_a_child_is_told_with_its_last_lines(tmp_path):
    child = await started(tmp_path, "print('line 1'); raise SystemExit('out of luck')")
    await asyncio.wait_for(child.process.wait(), LIMIT_S)
    told = child.describe_end()
    assert told.startswith("probe ended with exit status 1; its last lines:\n")
    assert "out of luck" in told


async def test_a_signal_is_named(tmp_path):
    child = await started(tmp_path, "import os; os.kill(os.getpid(), 9)")
    await asyncio.wait_for(child.process.wait(), LIMIT_S)
    assert child.describe_end() == "probe was ended by SIGKILL without a word"


async def test_stop_ends_a_child_that_ignores_sigterm_and_what_it_started(tmp_path):
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(inner.pid, flush=True)\n"
        "signal.pause()\n"
    )
    child = await start_child(
        [sys.executable, "-c", code],
        name="stubborn",
        log=tmp_path / "log",
        environment=os.environ,
        pipe_stdout=True,
    )
    inner = psutil.Process(int(await asyncio.wait_for(child.stdout.readline(), LIMIT_S)))
    await child.stop(timeout_s=0.1)
    assert child.process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + LIMIT_S
    while is_left(inner):
        assert time.monotonic() < deadline, "what the child had started was left behind"
        time.sleep(0.02)


@pytest.mark.parametrize("command_of", [isolated_module, own_module])
def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path, command_of):
    (tmp_path / "geotrain").mkdir()  # as the folder above a clone has it
    command = command_of("geotrain", ["version"])
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert told.stdout.strip() == __version__, told.stderr
