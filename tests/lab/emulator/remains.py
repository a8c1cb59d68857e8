"""What a lab leaves behind: processes, namespaces, devices, files, a changed congestion control.

Other work may run on the machine, with labs of its own, so processes are told by a mark in their
environment, which children inherit however they were started.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "GEOTRAIN_TEST_MARK"
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_SHARED = Path("/dev/shm")
_NAMED_NAMESPACES = Path("/run/netns")


@dataclass(frozen=True, kw_only=True)
class Before:
    """How the machine was before the lab."""

    mark: str
    devices: frozenset[str]
    shared: frozenset[Path]
    namespaces: frozenset[Path]
    congestion: str


def look(mark: str) -> Before:
    """Before the first process with this mark in its environment is started."""
    return Before(
        mark=mark,
        devices=frozenset(os.listdir("/sys/class/net")),
        shared=frozenset(_SHARED.iterdir()),
        namespaces=frozenset(_files(_NAMED_NAMESPACES)),
        congestion=_CONGESTION.read_text(),
    )


def left_behind(
    before: Before, *, folder: Path | None = None, limit_s: float = 30.0, but: int = 0
) -> list[str]:
    """What is still there once it has had time to go; empty where all went.

    Args:
        folder: Its temporary folder, which was empty.
        but: The process that owned the lab, where it is meant to be there.
    """
    deadline = time.monotonic() + limit_s
    while (found := list(_remains(before, folder, but))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def is_left(process: psutil.Process) -> bool:
    """Whether it still runs; one whose end nobody has taken notice of does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it went between the two looks
        return False


def _remains(before: Before, folder: Path | None, but: int) -> Iterator[str]:
    marked = [process for process in _marked(before.mark) if process.pid != but]
    for process in marked:
        yield f"process {process.pid}: {' '.join(process.info['cmdline'])[:100]}"
    home = os.readlink("/proc/self/ns/net")
    yield from {f"namespace {name}" for name in _namespaces(marked) if name != home}
    for device in set(os.listdir("/sys/class/net")) - before.devices:
        yield f"device {device}"
    for file in (set(_files(_NAMED_NAMESPACES)) - before.namespaces) | set(_files(folder)):
        yield f"file {file}"
    new = set(_SHARED.iterdir()) - before.shared
    if new:
        yield from (f"file {file}" for file in new - _in_use())
    if before.congestion != _CONGESTION.read_text():
        yield "another congestion control"


def _files(folder: Path | None) -> list[Path]:
    return list(folder.iterdir()) if folder is not None and folder.is_dir() else []


def _marked(mark: str) -> list[psutil.Process]:
    """Zombies have neither environment nor anything else, so they do not count."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _namespaces(processes: list[psutil.Process]) -> set[str]:
    """Network namespaces that one of these is in or holds open."""
    found = set()
    for process in processes:
        try:
            names = [f"fd/{name}" for name in os.listdir(f"/proc/{process.pid}/fd")]
            links = [os.readlink(f"/proc/{process.pid}/{name}") for name in ("ns/net", *names)]
        except OSError:
            continue
        found |= {link for link in links if link.startswith("net:[")}
    return found


def _in_use() -> set[Path]:
    """Files in shared memory that a process, whosever, has open."""
    found = set()
    for pid in psutil.pids():
        try:
            found |= {
                Path(os.readlink(f"/proc/{pid}/fd/{n}")) for n in os.listdir(f"/proc/{pid}/fd")
            }
        except OSError:
            continue
    return found
