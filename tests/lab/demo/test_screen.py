"""Which terminals get the live view, and that they get their cursor back. Real pseudo-terminals."""

import contextlib
import io
import os
import pty
import select
import struct
import termios
from fcntl import ioctl

import pytest
from rich.console import Console

from geotrain.lab.demo.screen import LiveScreen, can_show
from tests.lab.demo.running import running


@contextlib.contextmanager
def terminal(columns=80, rows=24, *, term="xterm-256color"):
    """A console on a terminal of that size, and the other end of it."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {"TERM": term}
    with os.fdopen(master, "rb", buffering=0) as far, os.fdopen(slave, "w") as near:
        console = Console(
            file=near, _environ=environment, width=columns, height=rows, legacy_windows=False
        )
        yield console, far, environment


def read_until(far, end, *, after):
    """What came, up to this text; it must have been written already."""
    data = b""
    while end not in data.partition(after)[2]:
        ready, _, _ = select.select([far], [], [], 30.0)
        assert ready, data
        data += far.read(1 << 16)
    return data.decode()


@pytest.mark.parametrize(
    ("columns", "rows", "term", "shown"),
    [
        (80, 24, "xterm-256color", True),
        (200, 60, "screen", True),
        (80, 24, "dumb", False),
        (80, 24, "", False),
        (60, 24, "xterm", False),
        (80, 12, "xterm", False),
    ],
)
def test_a_terminal_must_be_able_to_show_it(columns, rows, term, shown):
    with terminal(columns, rows, term=term) as (console, _, environment):
        assert can_show(console, environment) is shown


def test_a_pipe_is_no_terminal_even_where_colours_are_forced():
    environment = {"TERM": "xterm", "FORCE_COLOR": "1"}
    console = Console(file=io.StringIO(), _environ=environment, width=80, height=24)
    assert console.is_terminal
    assert not can_show(console, environment)


def test_the_screen_is_given_back_and_the_last_frame_stays():
    with terminal() as (console, far, _):
        screen = LiveScreen(running(2), console)
        screen.start()
        screen.draw()
        screen.stop()
        screen.stop()
        text = read_until(far, b"nothing so far", after=b"\x1b[?1049l")
    before, _, after = text.partition("\x1b[?1049l")
    assert "\x1b[?1049h" in before and "\x1b[?25l" in before
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "as each region ran it" in after
    assert "\x1b[?1049h" not in after


def test_a_terminal_that_is_gone_is_told_at_the_end():
    with terminal() as (console, far, _):
        screen = LiveScreen(running(1), console)
        screen.start()
        far.close()
        screen.draw()  # nobody sees it
        with pytest.raises(OSError, match="Input/output error"):
            screen.stop()
        os.dup2(os.open(os.devnull, os.O_WRONLY), console.file.fileno())
