"""`geotrain run`: the daemon and the training command as one job with one exit status.

A daemon that is killed is started again: the training process waits for it and loses nothing.
"""

import contextlib
import ctypes
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from geotrain.config import Config

# -P: what lies in the current folder must not shadow a package of the daemon's.
DAEMON_ARGV = (sys.executable, "-P", "-m", "geotrain", "daemon")
EXIT_DAEMON_DIED = 1
EXIT_CANNOT_START = 127
COMMAND_GRACE_S = 30.0
"""For the command after a forwarded signal: enough to end a step and save."""
DAEMON_GRACE_S = 10.0
"""For the daemon to tell its peers why."""

MAX_DEATHS = 5
DEATHS_WITHIN_S = 60.0
"""A daemon that is killed this often in so short a time will not live."""

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signalled:
    number: int


_Events = queue.SimpleQueue[_Ended | _Signalled]


def run(config: Config, command: Sequence[str], *, daemon_argv: Sequence[str] = DAEMON_ARGV) -> int:
    """Run both until the command ends, and leave nothing behind.

    Must be called from the main thread: the kernel ends the children when that thread is gone.
    Both find the config in GEOTRAIN_CONFIG.

    Returns:
        The command's exit status (128 + n for signal n); 1 where the daemon ended by itself or
        was killed again and again; 127 where the command cannot be started.
    """
    events: _Events = queue.SimpleQueue()
    environment = {**os.environ, "GEOTRAIN_CONFIG": str(config.path)}
    # Under nohup it is ignored from the start and stays so: a closed terminal ends nothing.
    spared = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    handlers = {number: signal.getsignal(number) for number in _FORWARDED if number not in spared}
    for number in handlers:
        signal.signal(number, lambda got, _frame: events.put(_Signalled(number=got)))
    tie = _parent_tie()
    children: dict[str, _Child] = {}
    try:
        children["daemon"] = _Child(daemon_argv, environment, tie)
        try:
            children["command"] = _Child(command, environment, tie)
        except OSError as error:
            _say(f"cannot start {command[0]}: {error.strerror}")
            return EXIT_CANNOT_START
        # Threads only now: nothing may run between fork and exec beside the forking thread.
        for who, child in children.items():
            child.watch(who, events)

        def start_daemon() -> _Child:
            # From this thread: with another one the kernel would end the daemon too early. The
            # others only wait for children, so nothing is held between fork and exec.
            children["daemon"] = _Child(daemon_argv, environment, tie)
            children["daemon"].watch("daemon", events)
            return children["daemon"]

        return _supervise(children["daemon"], children["command"], events, command, start_daemon)
    finally:
        for child in reversed(children.values()):
            child.end(DAEMON_GRACE_S)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _supervise(
    daemon: "_Child",
    command: "_Child",
    events: _Events,
    argv: Sequence[str],
    start_daemon: Callable[[], "_Child"],
) -> int:
    deadline: float | None = None
    was_signalled = False
    deaths: list[float] = []
    while True:
        try:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            event = events.get(timeout=left_s)
        except queue.Empty:
            _say(f"{shlex.join(argv)} did not end in {COMMAND_GRACE_S:g} s; killing it")
            command.kill_group()
            deadline = None
            continue
        match event:
            case _Signalled(number=number) if deadline is None:
                command.signal_group(number)
                was_signalled = True
                deadline = time.monotonic() + COMMAND_GRACE_S
            case _Signalled():
                command.kill_group()  # asked twice: no more patience
            case _Ended(who="command"):
                status = command.status()
                # After a signal everybody knows why it ended.
                if status > 0 and not was_signalled:
                    _say(f"{shlex.join(argv)} ended with exit status {status}")
                # Its status is taken last: until then the daemon can read it, and tell its peers.
                command.stop(DAEMON_GRACE_S)
                daemon.end(DAEMON_GRACE_S)
                status = command.end(DAEMON_GRACE_S)
                if status < 0:
                    _say(f"{shlex.join(argv)} was ended by {_signal_name(-status)}")
                return _as_a_shell(status)
            case _Ended():
                status = daemon.end(DAEMON_GRACE_S)
                now = time.monotonic()
                deaths = [died for died in deaths if died > now - DEATHS_WITHIN_S] + [now]
                if status < 0 and len(deaths) <= MAX_DEATHS:
                    _say(f"the daemon was ended by {_signal_name(-status)}; starting it again")
                    daemon = start_daemon()
                    continue
                status = _as_a_shell(status)
                command.end(DAEMON_GRACE_S)
                _say(f"the daemon ended first (exit status {status}), so the command was ended")
                return EXIT_DAEMON_DIED


class _Child:
    """One child in a session of its own, so that it and what it starts can be ended as one."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], tie: Callable[[], None]
    ) -> None:
        # A session and not only a group: a background group would stop when it reads a terminal.
        self._process = subprocess.Popen(
            argv, env=environment, start_new_session=True, preexec_fn=tie
        )
        self._gone = threading.Event()
        self._watched = False

    def watch(self, who: str, events: _Events) -> None:
        """Post `_Ended(who)` once the process has ended; it stays a zombie until `end`."""
        self._watched = True
        threading.Thread(target=self._watch, args=(who, events), daemon=True).start()

    def _watch(self, who: str, events: _Events) -> None:
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._gone.set()
        events.put(_Ended(who=who))

    def status(self) -> int:
        """The exit status once `_Ended` was posted, -n for signal n; leaves it to be read."""
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL at the deadline, to all of its session; its status stays there."""
        if not self._watched:
            self.watch("", queue.SimpleQueue())
        self.signal_group(signal.SIGTERM)
        self._gone.wait(grace_s)
        # Not reaped yet, so the group's number is still ours to kill what is left of it.
        self.kill_group()

    def end(self, grace_s: float) -> int:
        """Stop it, and return its exit status: -n for signal n."""
        if self._process.returncode is None:
            self.stop(grace_s)
        return self._process.wait()

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill_group(self) -> None:
        self.signal_group(signal.SIGKILL)


def _parent_tie() -> Callable[[], None]:
    """For a child to call before exec: the kernel ends it when this process ends by SIGKILL.

    SIGTERM and not SIGKILL, so that torchrun ends its workers and the daemon tells its peers.
    """
    parent_pid = os.getpid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def tie() -> None:
        if prctl is not None:  # Linux; elsewhere a SIGKILL of the parent leaves its children
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it ended before the line above
            os._exit(EXIT_CANNOT_START)

    return tie


def _as_a_shell(status: int) -> int:
    return 128 - status if status < 0 else status


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _say(line: str) -> None:
    print(f"geotrain run: {line}", file=sys.stderr, flush=True)
