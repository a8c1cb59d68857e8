"""How a process ended that is not our child, as far as the system tells.

Its parent alone gets the exit status. Until the parent has taken it, it stands in /proc; afterwards
Linux 6.15 and later tell it to whoever holds a pidfd from before.
"""

import fcntl
import os
import select
import struct

_PIDFD_GET_INFO = 0xC040FF0B
_INFO = struct.Struct("<QQ11Ii")
_INFO_EXIT = 1 << 3
_STAT_STATE, _STAT_EXIT_CODE = 0, 49
"""Counted from the field after the name."""


def exit_status_of(pid: int, pidfd: int, *, wait_s: float) -> int | None:
    """The exit status, -n for signal n as `subprocess` has it; None where nobody tells.

    Args:
        pidfd: Of that process, opened while it lived.
        wait_s: For the process to have ended; its sockets close a moment before.
    """
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    if not poller.poll(wait_s * 1000):
        return None
    code = _of_zombie(pid, pidfd)
    if code is None:  # its parent has it already
        code = _of_reaped(pidfd)
    return None if code is None else os.waitstatus_to_exitcode(code)


def _of_zombie(pid: int, pidfd: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
            still_there = f"Pid:\t{pid}\n" in file.read()  # else the number is another's by now
    except OSError:
        return None
    return int(fields[_STAT_EXIT_CODE]) if still_there and fields[_STAT_STATE] == "Z" else None


def _of_reaped(pidfd: int) -> int | None:
    asked = _INFO.pack(_INFO_EXIT, *[0] * 13)
    try:
        answer = _INFO.unpack(fcntl.ioctl(pidfd, _PIDFD_GET_INFO, asked))
    except OSError:  # an older kernel
        return None
    return answer[-1] if answer[0] & _INFO_EXIT else None
