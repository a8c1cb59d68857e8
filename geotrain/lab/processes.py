"""Child processes that cannot outlive their parent, whatever ends it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Runs between the start of a child and the command it becomes: asks the kernel to kill it when the
# parent's thread ends, however that happens, then makes sure that the parent had not ended already.
# A small program of its own because code between fork and exec of a threaded parent is not safe.
_TETHER = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
    sys.exit("cannot tie this process to its parent (prctl)")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent ended before its child began")
os.execvp(sys.argv[2], sys.argv[2:])
"""

_TAIL_LINES = 12


def cancel_on_signals(received: list[signal.Signals]) -> None:
    """Have the first signal that ends a command cancel the current task, noted in `received`.

    Later ones do nothing: the clean-up that the first began must not be interrupted. Under nohup a
    closed terminal ends nothing.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(number: signal.Signals) -> None:
        if not received:
            received.append(number)
            task.cancel()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, cancel, number)


def tethered(command: Sequence[str], *, parent_pid: int) -> list[str]:
    """The command, run so that the kernel kills it when the process `parent_pid` ends.

    It must be started by the main thread of that process.
    """
    return [sys.executable, "-I", "-S", "-c", _TETHER, str(parent_pid), *command]


def isolated_module(module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a module of this very package, whatever the folder or environment."""
    return [sys.executable, "-I", "-c", _run_module(module), *arguments]


def own_module(module: str, arguments: Sequence[str]) -> list[str]:
    """The same with the environment's packages; no folder called geotrain hides this one."""
    return [sys.executable, "-P", "-c", _run_module(module), *arguments]


def _run_module(module: str) -> str:
    root = str(Path(__file__).resolve().parents[2])
    return (
        f"import sys, runpy; sys.path.insert(0, {root!r}); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """One running child; its output goes to `log`, or its stdout to a pipe."""

    name: str
    log: Path
    process: asyncio.subprocess.Process

    @property
    def stdout(self) -> asyncio.StreamReader:
        assert self.process.stdout is not None, "started without pipe_stdout"
        return self.process.stdout

    def tail(self) -> str:
        """The last lines of its output."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def describe_end(self) -> str:
        """How it ended, in words, with the last lines of its output."""
        status = self.process.returncode
        if status is None:
            how = "is still running"
        elif status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        else:
            how = f"ended with exit status {status}"
        tail = self.tail()
        return f"{self.name} {how}" + (f"; its last lines:\n{tail}" if tail else " without a word")

    async def stop(self, *, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL at the deadline, to the child and what it started."""
        if self.process.returncode is None:
            self._signal_group(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), timeout_s)
        # What the child had started may outlive it within its group.
        self._signal_group(signal.SIGKILL)
        await self.process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


async def start_child(
    command: Sequence[str],
    *,
    name: str,
    log: Path,
    environment: Mapping[str, str],
    pipe_stdout: bool = False,
) -> Child:
    """Start a tethered child in a process group of its own, without a terminal's input."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *tethered(command, parent_pid=os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if pipe_stdout else output,
            stderr=output,
            env=dict(environment),
            process_group=0,
            limit=1 << 20,
        )
    return Child(name=name, log=log, process=process)
