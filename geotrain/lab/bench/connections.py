"""The TCP connections of this process, as the kernel knows them: their repeats.

By descriptor, whoever opened them, so that a measurement needs nothing of what it measures.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

_TCP_INFO_BYTES = 256
_BYTES_RETRANS = struct.Struct("<Q")
_BYTES_RETRANS_OFFSET = 208
"""Of tcpi_bytes_retrans in struct tcp_info, since Linux 4.19."""


@contextlib.contextmanager
def own_connections() -> Iterator[list[socket.socket]]:
    """Every established TCP connection of this process, as second descriptors of the sockets."""
    with contextlib.ExitStack() as stack:
        found = []
        for descriptor in _descriptors():
            try:
                # Cheap, since it is asked of hundreds while a loop's lag is measured.
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                sock = stack.enter_context(socket.socket(fileno=os.dup(descriptor)))
                if sock.type == socket.SOCK_STREAM and sock.family in _FAMILIES:
                    sock.getpeername()
                    found.append(sock)
            except OSError:
                continue  # it was closed while we looked, or is not connected
        yield found


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _descriptors() -> list[int]:
    folder = "/proc/self/fd"
    return [int(name) for name in os.listdir(folder)] if os.path.isdir(folder) else []


def retransmitted_bytes(sock: socket.socket) -> int | None:
    """What TCP has sent again on this connection; None where the kernel does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _BYTES_RETRANS_OFFSET + _BYTES_RETRANS.size:
        return None
    value: int = _BYTES_RETRANS.unpack_from(info, _BYTES_RETRANS_OFFSET)[0]
    return value


class Retransmissions:
    """Bytes sent again by all connections of this process, also by those that have gone since."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self.is_known = True

    def look(self) -> int:
        """The total so far, but for what a connection repeated between a look and its end."""
        with own_connections() as connections:
            for sock in connections:
                value = retransmitted_bytes(sock)
                if value is None:
                    self.is_known = False
                else:
                    self._seen[os.fstat(sock.fileno()).st_ino] = value
        return sum(self._seen.values())
