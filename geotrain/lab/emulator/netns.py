"""Network namespaces without names: they exist as long as a process or a descriptor holds them.

Nothing is written under /run/netns, so there is nothing to clean up: when the last holder is gone,
however it ended, the kernel takes the namespace, its devices and its routes away.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from geotrain.errors import ConfigError
from geotrain.lab.emulator.tun import TUN_PATH

_CLONE_NEWNET = 0x40000000
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_OWN_NAMESPACE = "/proc/self/ns/net"
_PURGE_LIMIT_S = 5.0

# A program of its own, so that nothing runs between fork and exec of a parent with threads. A lab
# that ends closes the path first and then ends what it finds inside: who got in and still sees the
# path will be found, and who does not see it any more must not stay.
_ENTER = """\
import ctypes, os, sys
try:
    namespace = os.open(sys.argv[1], os.O_RDONLY)
except OSError as error:
    sys.exit(f"the lab is gone ({error})")
if ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000) != 0:
    sys.exit(f"cannot enter the lab's site: {os.strerror(ctypes.get_errno())}")
try:
    same = os.path.samestat(os.stat(sys.argv[1]), os.fstat(namespace))
except OSError:
    same = False
if not same:
    sys.exit("the lab has just ended")
os.close(namespace)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"cannot start {sys.argv[2]}: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""


def obstacle() -> str | None:
    """Why there can be no namespaces here, in a few words, or None. Cheap, and changes nothing."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's (this is {sys.platform})"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        os.close(os.open(TUN_PATH, os.O_RDWR))
    except OSError as error:
        return f"{TUN_PATH} cannot be opened ({error.strerror})"
    if shutil.which("ip") is None:
        return "the command ip is not installed (package iproute2)"
    return None


def enter_command(namespace: str, command: Sequence[str]) -> list[str]:
    """The command, run inside the namespace at this path."""
    return [sys.executable, "-I", "-S", "-c", _ENTER, namespace, *command]


@contextlib.contextmanager
def inside(namespace_fd: int) -> Iterator[None]:
    """This thread, and what it starts, in the namespace for the time of the block."""
    home = os.open(_OWN_NAMESPACE, os.O_RDONLY)
    try:
        _call("setns", namespace_fd, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", home, _CLONE_NEWNET)
    finally:
        os.close(home)


def make_namespaces(count: int, congestion: str | None) -> list[int]:
    """New namespaces as descriptors, with this congestion control or the machine's.

    A namespace may choose among what the machine allows to everyone. What it does not, only
    inheriting gives: the machine's own choice is changed for the moment of the making. Must be
    called by a process without other threads (it forks, and may change its namespace).
    """
    if congestion is None:
        return _make(count)
    available = _AVAILABLE.read_text().split()
    if congestion not in available:
        raise ConfigError(
            f"this machine has no congestion control {congestion}; it has {', '.join(available)}"
        )
    namespaces = _make(count)
    try:
        for namespace in namespaces:
            with inside(namespace):
                _CONGESTION.write_text(congestion)
    except PermissionError:
        for namespace in namespaces:
            os.close(namespace)
        with _machine_congestion(congestion):
            return _make(count)
    return namespaces


def congestion_of(namespace_fd: int) -> str:
    with inside(namespace_fd):
        return _CONGESTION.read_text().strip()


def inode_of(namespace_fd: int) -> int:
    return os.fstat(namespace_fd).st_ino


def purge(inodes: Set[int]) -> None:
    """End every process that runs in one of these namespaces, and what it starts meanwhile.

    The way in (`enter_command`) must be closed before.
    """
    deadline = time.monotonic() + _PURGE_LIMIT_S
    num_empty = 0
    # Twice, since one that forks and ends may slip through a list that is being read.
    while num_empty < 2 and time.monotonic() < deadline:
        found = [pid for pid in _pids() if _namespace_inode(pid) in inodes and pid != os.getpid()]
        num_empty = 0 if found else num_empty + 1
        for pid in found:
            _kill_within(pid, inodes)
        time.sleep(0.002)


def _kill_within(pid: int, inodes: Set[int]) -> None:
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            # Asked again with the process held, since its number may have gone to another.
            if _namespace_inode(pid) in inodes:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _namespace_inode(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:  # gone, or a zombie
        return None


def _make(count: int) -> list[int]:
    home = os.open(_OWN_NAMESPACE, os.O_RDONLY)
    try:
        namespaces = []
        for _ in range(count):
            _call("unshare", _CLONE_NEWNET)
            namespaces.append(os.open(_OWN_NAMESPACE, os.O_RDONLY))
        return namespaces
    finally:
        _call("setns", home, _CLONE_NEWNET)
        os.close(home)


@contextlib.contextmanager
def _machine_congestion(wanted: str) -> Iterator[None]:
    """The machine's choice changed for the time of the block, even if this process is killed.

    The file's own lock keeps two labs from taking each other's choice for the machine's.
    """
    setting = os.open(_CONGESTION, os.O_RDWR)
    try:
        fcntl.flock(setting, fcntl.LOCK_EX)
        original = _CONGESTION.read_text()
        release, guard_pid = _start_guard(setting, original)
        try:
            os.pwrite(setting, wanted.encode(), 0)
            yield
        finally:
            os.close(release)  # the guard restores it, as it would if we had been killed
            os.waitpid(guard_pid, 0)
    finally:
        os.close(setting)


def _start_guard(setting: int, original: str) -> tuple[int, int]:
    """A process that writes `original` back once nobody holds the returned descriptor."""
    waiting, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(release)
            os.read(waiting, 1)
            os.pwrite(setting, original.encode(), 0)
        finally:
            os._exit(0)
    os.close(waiting)
    return release, pid


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        hint = " (CAP_SYS_ADMIN is missing)" if number == errno.EPERM else ""
        raise OSError(number, f"{name}: {os.strerror(number)}{hint}")
