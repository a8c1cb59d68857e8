"""`geotrain demo` in a terminal and in a pipe: what people see."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LIMIT_S = 150.0
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
A_STEP = rb"step \d+, as each region ran it"
"""Not any one step: frames are drawn in turns of their own, and one may be over between two."""
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
# So that a Ctrl-C which is typed at the terminal reaches the demo as from a shell.
IN_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "geotrain", "demo", *sys.argv[1:]])
"""


class Terminal:
    """The end of a pseudo-terminal at which a person would sit."""

    def __init__(self, master: int, process: subprocess.Popen) -> None:
        self.master = master
        self.process = process
        self.data = b""

    def read_until(self, pattern: bytes) -> None:
        """Until it stands somewhere in what came so far."""
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.data):
            assert self._read(deadline), f"it ended without {pattern!r}: {self.data!r}"

    def read_to_the_end(self) -> int:
        """Returns the exit status."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        return self.process.wait(LIMIT_S)

    def hang_up(self) -> None:
        """What closing the window does."""
        os.close(self.master)
        self.master = -1

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing within {LIMIT_S:g} s: {self.data!r}"
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # how Linux says that the last process at the terminal has ended
            return False
        self.data += data
        return bool(data)


@contextmanager
def terminal(folder, *options: str, **environment: str) -> Iterator[Terminal]:
    """The demo at a terminal of 80 columns and 24 rows, with its temporary files in `folder`."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *options],
        env={**os.environ, "TERM": "xterm-256color", "TMPDIR": str(folder), **environment},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    seen = Terminal(master, process)
    try:
        with process:
            yield seen
            process.kill()
    finally:
        process.kill()
        if seen.master >= 0:
            os.close(seen.master)


def test_in_a_terminal_it_shows_the_run_and_leaves_the_last_frame_and_the_summary(tmp_path):
    with terminal(tmp_path, "--rtt-ms", "40", "--steps", "6") as seen:
        assert seen.read_to_the_end() == 0, seen.data
    before, _, rest = seen.data.partition(ENTER)
    live, _, after = rest.partition(LEAVE)
    assert b"2 regions: virginia, frankfurt" in before
    assert seen.data.rindex(SHOW) > seen.data.rindex(HIDE)
    shown = live.decode()
    for text in ("starting", "virginia-frankfurt", "what changed, and why"):
        assert text in shown
    assert re.search(r"step [1-6] of 6", shown)
    assert "\x1b[36m" in shown and "\x1b[35m" in shown
    left = re.sub(r"\x1b\[[0-9;]*m", "", after.decode())
    assert "\x1b" not in left
    assert "step 6 of 6" in left and "step 6, as each region ran it" in left
    (timeline,) = re.findall(r"^virginia   (\D*0.*)$", left.replace("\r", ""), re.MULTILINE)
    assert "▒" in timeline and "█" in timeline
    for row in ("measured", "T_ideal", "lower bound", "one process"):
        assert re.search(rf"^  {row} +\d+\.\d+  ", left, re.MULTILINE), left
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_gives_the_terminal_back_and_no_color_means_no_colour(tmp_path):
    with terminal(tmp_path, "--rtt-ms", "5", "--steps", "1000", NO_COLOR="1") as seen:
        before = termios.tcgetattr(seen.master)
        seen.read_until(A_STEP)
        os.write(seen.master, b"\x03")
        assert seen.read_to_the_end() == 130
        assert termios.tcgetattr(seen.master) == before
    _, _, after = seen.data.partition(LEAVE)
    assert seen.data.count(ENTER) == seen.data.count(LEAVE) == 1
    assert seen.data.rindex(SHOW) > seen.data.rindex(HIDE)
    styles = set(re.findall(rb"\x1b\[([0-9;]*)m", seen.data))
    assert styles <= {b"0", b"1", b"2"}, styles  # bold and dim are no colours
    assert after.endswith(b"geotrain demo: stopped by SIGINT\r\n")
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_that_goes_away_ends_it_and_leaves_nothing(tmp_path):
    with terminal(tmp_path, "--regions", "1", "--steps", "1000") as seen:
        seen.read_until(A_STEP)
        children = psutil.Process(seen.process.pid).children(recursive=True)
        assert len(children) == 2  # the training process, and the lab's keeper
        seen.hang_up()
        assert seen.process.wait(LIMIT_S) in (1, 129)
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_in_a_pipe_it_prints_a_line_a_step_and_what_changed(tmp_path):
    script = tmp_path / "weather.toml"
    script.write_text("[[change]]\nat_s = 0\nrtt_ms = 100\nwhy = 'a detour'\n")
    folder = tmp_path / "own"
    folder.mkdir()
    command = ["--rtt-ms", "0", "--steps", "4", "--no-baseline", "--script", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "geotrain", "demo", *command],
        env={**os.environ, "TERM": "xterm-256color", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    (alone,) = (line for line in lines if line.startswith("  one process "))
    assert not re.search(r"\d", alone.removesuffix("plain torch, alone, one thread")), alone
    # Others may be told, such as that a region's process got no processor for a while.
    changes = [line for line in lines if line.startswith("at ") and "every link" in line]
    assert len(changes) == 1
    assert changes[0].endswith("every link: round trip 100 ms (a detour)")
    assert lines.index(steps[0]) < lines.index(changes[0])
    assert list(folder.iterdir()) == []


def test_plain_lines_in_a_terminal_and_no_folder_of_a_killed_demo_of_one_region(tmp_path):
    with terminal(tmp_path, "--plain", "--regions", "1", "--steps", "1000") as seen:
        seen.read_until(rb"step +2/1000 ")
        assert b"\x1b" not in seen.data
        assert len(list(tmp_path.iterdir())) == 1
        seen.process.kill()
    deadline = time.monotonic() + LIMIT_S
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
