"""A connection taken over from aiohttp, plain or with TLS, on either side.

asyncio's TLS stays between the connection and us: it decrypts into the buffers that the lane gives,
and encrypts in `write`. What it would decide by itself is decided below it, at the TCP connection,
so that both kinds behave alike:

- It hands everything to TCP's transport, which takes 64 KiB before it says so, and never tells the
  lane of them. Here that transport tells of every byte that waits.
- At the end of a connection it hands on one buffer of what it has, and drops the rest: here the end
  waits until all has been handed on.
- It cannot end one direction alone, and its own farewell breaks the connection when the peer still
  sends. Frames have an end of their own (CLOSE), so here connections end as plain ones do.
"""

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING

from geotrain.transport.carrier import KernelCounts, Receiver
from geotrain.transport.congestion import BBR, FOR_CONTROL, InForce, choose_congestion
from geotrain.transport.estimator import unsent_bytes
from geotrain.transport.tcp import pace, read_counts

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

PLAIN = "no"


class HttpCarrier(asyncio.BufferedProtocol):
    """See the module."""

    def __init__(
        self, transport: asyncio.Transport, replaced: asyncio.BaseProtocol, *, congestion: str
    ) -> None:
        """Raises ConnectionResetError where the connection is gone already."""
        self._transport = transport
        self._tcp = _below(transport)
        self._replaced = replaced
        self._receiver: Receiver | None = None
        self._bytes_wait = False
        self.closed = asyncio.Event()
        transport.set_protocol(self)
        self._between: _Between | None = None
        if self._tcp is not transport:
            self._between = _Between(self._tcp, self)
            self._tcp.set_protocol(self._between)
            transport.set_write_buffer_limits(high=1)
        # The lane decides what goes next as late as it can: it hears of every byte that waits.
        self._tcp.set_write_buffer_limits(high=1)
        if not transport.is_reading():
            transport.resume_reading()
        # By asyncio's TLS it is no longer to be had once the connection is lost.
        self._socket: socket.socket = transport.get_extra_info("socket")
        in_force = _tune(self._socket, congestion)
        self.congestion, self.congestion_refused = in_force.name, in_force.refused
        self.tls = _encryption(transport.get_extra_info("ssl_object"))
        self.peer_address = address(transport.get_extra_info("peername"))

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def write(self, data: bytes | memoryview) -> None:
        self._transport.write(data)

    @property
    def bytes_waiting(self) -> int:
        """Written and not yet taken by the kernel; with TLS some as they are, some encrypted."""
        waiting = self._tcp.get_write_buffer_size()
        if self._tcp is not self._transport:
            waiting += self._transport.get_write_buffer_size()
        return waiting

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            if self._between is not None:
                self._between.end_soon()

    def expect_rate(self, rate_bytes_per_s: float | None) -> None:
        connection = self._socket
        if connection.fileno() < 0:
            return  # With TLS the socket is closed a turn before the lane hears of it.
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and connection.family != socket.AF_UNIX:
            wanted = unsent_bytes(rate_bytes_per_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, wanted)

    def pace(self, rate_bytes_per_s: float) -> None:
        pace(self._socket, rate_bytes_per_s)

    def carry(self, *, bulk: bool) -> None:
        if self.congestion and self._socket.fileno() >= 0:
            choose_congestion(self._socket, self.congestion if bulk else FOR_CONTROL)

    def counts(self) -> KernelCounts | None:
        return read_counts(self._socket, bbr=self.congestion == BBR)

    def close(self) -> None:
        self._tcp.close()

    def end_writing(self) -> None:
        if self._tcp.can_write_eof() and not self._tcp.is_closing():
            try:
                self._tcp.write_eof()
            except OSError:
                # The peer has reset it meanwhile.
                self._tcp.abort()
        else:
            self._tcp.close()

    def abort(self) -> None:
        # asyncio's transport fails on it where it is gone, or was closed with bytes still to write.
        if not self.closed.is_set():
            self._tcp.abort()

    # asyncio's side ------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        assert self._receiver is not None, "started in the turn of the hand-over"
        return self._receiver.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        assert self._receiver is not None
        self._receiver.buffer_updated(nbytes)
        if self._between is not None:
            self._between.end_soon()

    def eof_received(self) -> bool:
        return False

    @property
    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_writing(self) -> None:
        self.look()

    def resume_writing(self) -> None:
        self.look()

    def look(self) -> None:
        """Tell the receiver where it changed whether bytes wait, encrypted or not."""
        bytes_wait = self.bytes_waiting > 0
        if bytes_wait == self._bytes_wait:
            return
        self._bytes_wait = bytes_wait
        if self._receiver is not None:
            if bytes_wait:
                self._receiver.pause_writing()
            else:
                self._receiver.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(self._replaced, asyncio.Protocol):
            self._replaced.connection_lost(exc)
        self.closed.set()
        if self._receiver is not None:
            self._receiver.connection_lost(_lost_reason(exc))


class _Between(asyncio.BufferedProtocol):
    """asyncio's TLS; the carrier hears when TCP's buffer fills and empties, and of the end last."""

    def __init__(self, tcp: asyncio.Transport, carrier: HttpCarrier) -> None:
        tls = tcp.get_protocol()
        assert isinstance(tls, asyncio.BufferedProtocol)
        self._tls = tls
        self._tcp = tcp
        self._carrier = carrier
        self._has_ended = False
        self._end_handle: asyncio.Handle | None = None

    def get_buffer(self, sizehint: int) -> "Buffer":
        return self._tls.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self._tls.buffer_updated(nbytes)

    def eof_received(self) -> bool:
        self._has_ended = True
        self.end_soon()
        return True

    def end_soon(self) -> None:
        """Where the peer has ended: hand the end on, unless asyncio hands on something before it.

        Called whenever it may: it has then put its own next turn before ours.
        """
        if self._has_ended:
            if self._end_handle is not None:
                self._end_handle.cancel()
            self._end_handle = asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        if self._has_ended and self._carrier.is_reading:
            self._has_ended = False
            if not self._tls.eof_received():
                self._tcp.close()

    def pause_writing(self) -> None:
        self._tls.pause_writing()
        self._carrier.look()

    def resume_writing(self) -> None:
        self._tls.resume_writing()
        self._carrier.look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = False
        self._tls.connection_lost(exc)


def address(peername: object) -> str:
    """An address of a socket, for people."""
    if isinstance(peername, tuple) and len(peername) >= 2:
        host = f"[{peername[0]}]" if ":" in str(peername[0]) else peername[0]
        return f"{host}:{peername[1]}"
    return str(peername)


def _below(transport: asyncio.Transport) -> asyncio.Transport:
    """The TCP transport; asyncio has no public way from a TLS transport to it (3.11 to 3.14).

    Raises:
        ConnectionResetError: It is gone, of which asyncio's TLS tells a turn late.
    """
    if transport.get_extra_info("ssl_object") is None:
        return transport
    tcp = transport._ssl_protocol._transport  # type: ignore[attr-defined]
    if tcp is None:
        raise ConnectionResetError
    assert isinstance(tcp, asyncio.Transport)
    return tcp


def _encryption(tls: ssl.SSLObject | None) -> str:
    if tls is None:
        return PLAIN
    cipher = tls.cipher()
    return f"{tls.version()}, {cipher[0] if cipher is not None else 'unknown cipher'}"


def _lost_reason(exc: Exception | None) -> str:
    if exc is None:
        return "the peer closed the connection"
    if isinstance(exc, OSError) and exc.strerror:
        return f"connection lost: {exc.strerror}"
    return f"connection lost: {exc}"


def _tune(connection: socket.socket, congestion: str) -> InForce:
    """Set what a lane wants where the machine has it; returns the congestion control in force."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return InForce(name="", refused="")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes(None))
    return choose_congestion(connection, congestion)
