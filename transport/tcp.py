"""What the kernel tells of a TCP connection, and how fast it may send. Linux; else nothing."""

import socket
import sys
from struct import Struct

from geotrain.transport.carrier import KernelCounts

_SO_MAX_PACING_RATE = 47
_RTT_AT, _ACKED_AT, _RWND_LIMITED_AT, _SNDBUF_LIMITED_AT, _RETRANSMITTED_AT = 68, 120, 176, 184, 208
"""In struct tcp_info of linux/tcp.h; the last one came with Linux 4.19."""
_INFO_BYTES = 256
_U32, _U64 = Struct("=I"), Struct("=Q")
_MAX_U32 = 2**32 - 1


def read_counts(connection: socket.socket) -> KernelCounts | None:
    """None where the kernel does not tell, or the connection is gone."""
    if not _is_linux_tcp(connection):
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) < _RETRANSMITTED_AT + _U64.size:
        return None
    u64 = {
        at: _U64.unpack_from(info, at)[0]
        for at in (_ACKED_AT, _RWND_LIMITED_AT, _SNDBUF_LIMITED_AT, _RETRANSMITTED_AT)
    }
    return KernelCounts(
        acked_bytes=u64[_ACKED_AT],
        retransmitted_bytes=u64[_RETRANSMITTED_AT],
        limited_s=(u64[_RWND_LIMITED_AT] + u64[_SNDBUF_LIMITED_AT]) * 1e-6,
        rtt_s=_U32.unpack_from(info, _RTT_AT)[0] * 1e-6,
    )


def pace(connection: socket.socket, rate_bytes_per_s: float) -> None:
    """Have the kernel space out what it sends; of a connection that is gone, nothing happens."""
    if not _is_linux_tcp(connection):
        return
    # 32 bits, which every kernel takes; the greatest means no limit.
    rate = int(min(rate_bytes_per_s, _MAX_U32))
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _U32.pack(rate))


def _is_linux_tcp(connection: socket.socket) -> bool:
    inet = connection.family in (socket.AF_INET, socket.AF_INET6)
    return sys.platform == "linux" and inet and connection.fileno() >= 0
