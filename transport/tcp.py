"""What the kernel tells of a TCP connection, and how fast it may send. Linux; else nothing."""

import socket
import sys
from struct import Struct

from geotrain.transport.carrier import BbrState, KernelCounts

_SO_MAX_PACING_RATE = 47
_UNACKED_AT, _RTT_AT, _WINDOW_AT = 24, 68, 80
_ACKED_AT, _RWND_LIMITED_AT, _SNDBUF_LIMITED_AT, _RETRANSMITTED_AT = 120, 176, 184, 208
"""In struct tcp_info of linux/tcp.h; the last one came with Linux 4.19."""
_INFO_BYTES = 256
_TCP_CC_INFO = 26
_BBR_INFO = Struct("=5I")
"""struct tcp_bbr_info of linux/inet_diag.h: the rate (low, high), min_rtt, two gains."""
_PROBE_PACKETS = 4
"""The window in PROBE_RTT; else it is wider, but for what a timeout leaves of it."""
_U32, _U64 = Struct("=I"), Struct("=Q")
_MAX_U32 = 2**32 - 1


def read_counts(connection: socket.socket, *, bbr: bool = False) -> KernelCounts | None:
    """None where the kernel does not tell, or the connection is gone.

    Args:
        bbr: Whether it runs under BBR.
    """
    if not _is_linux_tcp(connection):
        return None
    bbr_info = b""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if bbr:
            bbr_info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_CC_INFO, _BBR_INFO.size)
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
        bbr=_bbr_state(info, bbr_info) if len(bbr_info) == _BBR_INFO.size else None,
    )


def _bbr_state(info: bytes, bbr_info: bytes) -> BbrState:
    rate_low, rate_high, min_rtt_us, *_ = _BBR_INFO.unpack(bbr_info)
    return BbrState(
        min_rtt_us=min_rtt_us,
        rate_bytes_s=rate_low + (rate_high << 32),
        is_probed=_U32.unpack_from(info, _WINDOW_AT)[0] <= _PROBE_PACKETS,
        is_idle=_U32.unpack_from(info, _UNACKED_AT)[0] == 0,
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
