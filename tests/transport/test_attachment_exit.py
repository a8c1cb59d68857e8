"""Whichever way a rank's process or its daemon ends, the other notices and nothing is left."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from geotrain.daemon.attachments import ended_how
from geotrain.errors import AttachError
from tests.transport.local_line import TIMEOUT_S, LocalLine, local_line, wait_for_state

FORWARD, BACKWARD = 0, 1
KERNEL_TELLS = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)
"""Of a process whose parent has taken its status already."""


@pytest.fixture
def line(tmp_path: Path) -> Iterator[LocalLine]:
    with local_line(tmp_path, 2) as line:
        yield line


RANK = """
    import os, sys, time
    from pathlib import Path
    from geotrain.transport.attachment import Attachment

    attachment = Attachment.connect(
        Path(sys.argv[1]), run_hash="hash", version="1.0", region="a", rank=0, world_size=1,
        arena_bytes=1 << 20, streams_in=[1], streams_out=[0], timeout_s=30,
    )
    attachment.action = "1F3 of step 7"
"""
READY = "attachment.ready({})"


@contextlib.contextmanager
def rank_process(line: LocalLine, *lines: str) -> Iterator[subprocess.Popen[bytes]]:
    script = textwrap.dedent(RANK) + "\n".join(lines)
    argv = [sys.executable, "-c", script, str(line.socket_path(0))]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(TIMEOUT_S)


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:geotrain")


def num_io_threads() -> int:
    return sum(thread.name == "geotrain-attachment" for thread in threading.enumerate())


def test_a_killed_rank_is_lost_at_once_with_its_last_action(line: LocalLine) -> None:
    with contextlib.closing(line.attach(1)) as b:
        before = mapped_arenas()
        with rank_process(line, READY, "time.sleep(60)") as process:
            wait_for_state(b, "a", "ready")
            assert mapped_arenas() == before + 1
            process.send_signal(signal.SIGKILL)
            error = wait_for_state(b, "a", "failed").error
        assert error is not None
        assert error["kind"] == "lost"
        assert f"pid {process.pid}" in error["detail"]
        assert "'1F3 of step 7'" in error["detail"]
        line.settle()
        assert mapped_arenas() == before
        line.attach(0).close()


@pytest.mark.parametrize("reaped", [False, True], ids=["zombie", "reaped"])
@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", "was ended by SIGTERM (its job was cancelled?"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL (out of memory?"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV;"),
        ("os._exit(3)", "ended with exit status 3 without leaving the run"),
    ],
    ids=["SIGTERM", "SIGKILL", "SIGSEGV", "exit"],
)
def test_how_a_rank_ended_is_told_where_the_system_tells(
    line: LocalLine, end: str, words: str, reaped: bool
) -> None:
    with contextlib.closing(line.attach(1)) as b:
        with rank_process(line, READY, "import signal", "sys.stdin.read(1)", end) as process:
            wait_for_state(b, "a", "ready")
            assert process.stdin is not None
            with line.paused() if reaped else contextlib.nullcontext():
                process.stdin.close()
                if reaped:  # the daemon looks only now
                    process.wait(TIMEOUT_S)
            error = wait_for_state(b, "a", "failed").error
        assert error is not None
        assert error["kind"] == "lost"
        if reaped and not KERNEL_TELLS:
            words = "ended without saying why"
        assert words in error["detail"]


def test_how_a_rank_ended_is_logged_once_a_daemon(
    line: LocalLine, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(line.attach(1)) as b:
        with rank_process(line, READY, "time.sleep(60)") as process:
            wait_for_state(b, "a", "ready")
            process.kill()
            wait_for_state(b, "a", "failed")
            line.attach(0).close()  # by now all of its end has been noticed
    alarms = [text for text in caplog.messages if text.startswith("! ")]
    about = [text for text in alarms if f"(pid {process.pid})" in text]
    assert len(about) == 2  # one in each of the two regions' daemons
    assert all(text.startswith("! region a: failed: region a: rank 0 ") for text in about)


def test_the_end_of_a_rank_whose_region_had_failed_before_is_told_by_itself(
    line: LocalLine, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(line.attach(1)) as b:
        with rank_process(line, READY, "time.sleep(60)") as process:
            wait_for_state(b, "a", "ready")
            line.call(lambda: line.exchanges[0].fail("link", "the link to region b failed"))
            process.kill()
            process.wait(TIMEOUT_S)
            line.attach(0).close()
    about = [text for text in caplog.messages if f"! rank 0 (pid {process.pid}) " in text]
    assert len(about) == 1
    assert "last seen in '1F3 of step 7'" in about[0]


def test_a_rank_that_closed_its_socket_but_lives_is_not_said_to_have_ended_by_anything() -> None:
    assert ended_how(None, "its socket closed") == (
        "ended without saying why (its socket closed); whoever started it has its exit status"
    )
    assert ended_how(-40, "") == "was ended by signal 40"


@pytest.mark.parametrize("shares_socket", [False, True])
def test_a_forked_child_does_not_hide_the_rank_s_death(
    line: LocalLine, shares_socket: bool
) -> None:
    """By os.fork the child closes the socket itself; a child made past Python keeps it open."""
    if shares_socket:
        fork = "import ctypes; pid = ctypes.CDLL(None).fork()"
    else:
        fork = "pid = os.fork()"
    child = "if pid == 0: sys.stdin.read(); os._exit(0)"
    with contextlib.closing(line.attach(1)) as b:
        with rank_process(line, fork, child, READY, "time.sleep(60)") as process:
            wait_for_state(b, "a", "ready")
            process.send_signal(signal.SIGKILL)
            entry = wait_for_state(b, "a", "failed")  # the child goes on, as long as it has stdin
            assert entry.error is not None
            assert "was ended by SIGKILL" in entry.error["detail"]


def test_an_uncaught_exception_is_reported_with_its_text(line: LocalLine) -> None:
    with contextlib.closing(line.attach(1)) as b:
        with rank_process(line, "raise KeyError('no such column')") as process:
            error = wait_for_state(b, "a", "failed").error
            process.wait(TIMEOUT_S)
        assert error is not None
        assert error["kind"] == "exception"
        assert error["detail"] == "in user code: KeyError: 'no such column'"


def test_a_process_that_just_ends_has_left(line: LocalLine) -> None:
    with contextlib.closing(line.attach(1)) as b:
        with rank_process(line, "pass"):
            assert wait_for_state(b, "a", "left").note == "the process ended"


def test_a_killed_daemon_leaves_no_memory_with_the_rank_after_close(line: LocalLine) -> None:
    before, num_threads = mapped_arenas(), num_io_threads()
    a = line.attach(0)
    line.close_daemon(0)
    with pytest.raises(AttachError):
        a.wait(lambda: False, timeout_s=TIMEOUT_S)
    a.close()
    line.settle()
    assert mapped_arenas() == before
    assert num_io_threads() == num_threads
