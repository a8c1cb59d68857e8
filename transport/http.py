"""The WAN carrier: an HTTP upgrade by aiohttp, then the connection is ours.

The hand-over (each line was found by losing bytes without it):

- The server sets its own protocol *before* it writes the 101 itself, then stays silent until the
  client has spoken: aiohttp's parser would take a first frame that arrives with the 101.
- The handler waits for as long as the lane lives: one that returns writes "200 OK" into it.
- The carrier passes connection_lost on to the protocol it replaced, or aiohttp waits for it when
  it cleans up, and it keeps the response object, whose end would close the connection.

No aiohttp exception leaves this file.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import aiohttp
from aiohttp import http_exceptions, web
from aiohttp.typedefs import Handler

from geotrain.transport.carrier import Carrier, DialError, Receiver
from geotrain.transport.congestion import AUTO, InForce, choose_congestion
from geotrain.transport.estimator import unsent_bytes
from geotrain.transport.messages import MAX_NAME_CHARS, printable

PATH = "/link"
UPGRADE = "geotrain/1"
FROM_HEADER, TO_HEADER = "Geotrain-From", "Geotrain-To"
MAX_REASON_BYTES = 1_024
SHUTDOWN_TIMEOUT_S = 2.0
FIRST_REQUEST_S = 10.0
"""How long a connection may say nothing before it has asked for anything."""


class _NoNonsense(logging.Filter):
    """Whoever reaches the port can send nonsense; a traceback of each would bury our own lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, http_exceptions.HttpProcessingError)


_VISITORS = logging.getLogger("geotrain.transport.http.visitors")
_VISITORS.addFilter(_NoNonsense())
_RESPONSE = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n"


class HttpCarrier(asyncio.BufferedProtocol):
    """A connection taken over from aiohttp, on either side."""

    def __init__(
        self, transport: asyncio.Transport, replaced: asyncio.BaseProtocol, *, congestion: str
    ) -> None:
        self._transport = transport
        self._replaced = replaced
        self._receiver: Receiver | None = None
        self.closed = asyncio.Event()
        # The lane decides what goes next as late as it can: it hears of every byte that waits.
        transport.set_write_buffer_limits(high=1)
        transport.set_protocol(self)
        if not transport.is_reading():
            transport.resume_reading()
        in_force = _tune(transport.get_extra_info("socket"), congestion)
        self.congestion, self.congestion_refused = in_force.name, in_force.refused
        self.peer_address = _address(transport.get_extra_info("peername"))

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def write(self, data: bytes | memoryview) -> None:
        self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def expect_rate(self, rate_bytes_per_s: float | None) -> None:
        connection = self._transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and connection.family != socket.AF_UNIX:
            wanted = unsent_bytes(rate_bytes_per_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, wanted)

    def close(self) -> None:
        self._transport.close()

    def end_writing(self) -> None:
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def abort(self) -> None:
        if not self.closed.is_set():  # A transport that is gone has no loop to abort it on.
            self._transport.abort()

    # asyncio's side ------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        assert self._receiver is not None, "started in the turn of the hand-over"
        return self._receiver.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        assert self._receiver is not None
        self._receiver.buffer_updated(nbytes)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.pause_writing()

    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(self._replaced, asyncio.Protocol):
            self._replaced.connection_lost(exc)
        self.closed.set()
        if self._receiver is not None:
            self._receiver.connection_lost(_lost_reason(exc))


@asynccontextmanager
async def dial(
    url: str, *, region: str, to: str, timeout_s: float, congestion: str = AUTO
) -> AsyncIterator[Carrier]:
    """Connect to the daemon of region `to`; the connection ends with the context.

    Args:
        congestion: See congestion.py; what it was refused is told by the carrier.

    Raises:
        DialError: With the reason for people, within `timeout_s`.
    """
    headers = {
        "Connection": "Upgrade",
        "Upgrade": UPGRADE,
        FROM_HEADER: region,
        TO_HEADER: to,
    }
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as http:
        try:
            async with asyncio.timeout(timeout_s):
                response = await http.get(
                    url.rstrip("/") + PATH, headers=headers, allow_redirects=False
                )
                if response.status != 101:
                    raise DialError(await _answer(response))
        except TimeoutError as exc:
            raise DialError(f"no answer from {url} within {timeout_s:g} s") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise DialError(_dial_reason(url, exc)) from exc
        carrier = _take_over(response, url, congestion)
        try:
            yield carrier
        finally:
            carrier.abort()
            await carrier.closed.wait()
            response.close()


class Acceptor(Protocol):
    """What a server hands accepted carriers to."""

    def accept(self, carrier: Carrier) -> None: ...


class LinkServer:
    """The one port of a daemon, where its peers dial in."""

    def __init__(self, *, congestion: str = AUTO) -> None:
        self._congestion = congestion
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._links: Callable[[str], Acceptor | None] = lambda region: None
        self._carriers: set[HttpCarrier] = set()
        self.port = 0
        """The real one, once started."""

    async def start(self, host: str, port: int, links: Callable[[str], Acceptor | None]) -> None:
        """Listen until `close`.

        Args:
            links: The link to the region of this name, None where it is no peer.

        Raises:
            OSError: The address cannot be had (EADDRINUSE: the port is in use).
        """
        self._links = links
        application = web.Application(middlewares=[self._hear])
        application.router.add_get(PATH, self._upgrade)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            keepalive_timeout=FIRST_REQUEST_S,
            logger=_VISITORS,
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(self._welcome, host, port)
        except OSError:
            await self.close()
            raise
        self.port = self._listening.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and end every lane that was accepted here."""
        for carrier in list(self._carriers):
            carrier.abort()
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        for timer in self._silent.values():
            timer.cancel()
        self._silent.clear()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _welcome(self) -> asyncio.BaseProtocol:
        """aiohttp waits for a first request for ever: a port open to all must not."""
        assert self._runner is not None and self._runner.server is not None
        visitor = self._runner.server()
        loop = asyncio.get_running_loop()
        self._silent[visitor] = loop.call_later(FIRST_REQUEST_S, self._turn_away, visitor)
        return visitor

    def _turn_away(self, visitor: web.RequestHandler) -> None:
        del self._silent[visitor]
        if visitor.transport is not None:
            visitor.transport.close()

    @web.middleware
    async def _hear(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        timer = self._silent.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()
        return await handler(request)

    async def _upgrade(self, request: web.Request) -> web.StreamResponse:
        region = request.headers.get(FROM_HEADER, "")[:MAX_NAME_CHARS]
        if request.headers.get("Upgrade") != UPGRADE:
            return web.Response(status=426, text=f"speak {UPGRADE}\n", headers={"Upgrade": UPGRADE})
        link = self._links(region)
        if link is None:
            return web.Response(status=403, text=f"region {region!r} is no peer of this daemon\n")
        transport = request.transport
        if transport is None:
            return web.Response(status=400)
        assert isinstance(transport, asyncio.Transport)
        carrier = HttpCarrier(transport, request.protocol, congestion=self._congestion)
        self._carriers.add(carrier)
        try:
            carrier.write(_RESPONSE.encode("ascii"))
            link.accept(carrier)
            await carrier.closed.wait()
        finally:
            carrier.abort()
            self._carriers.discard(carrier)
        return web.Response()


def _take_over(response: aiohttp.ClientResponse, url: str, congestion: str) -> HttpCarrier:
    connection = response.connection
    if connection is None or connection.transport is None or connection.protocol is None:
        raise DialError(f"{url} closed the connection as it was handed over")
    assert isinstance(connection.transport, asyncio.Transport)
    return HttpCarrier(connection.transport, connection.protocol, congestion=congestion)


async def _answer(response: aiohttp.ClientResponse) -> str:
    body = await response.content.read(MAX_REASON_BYTES)
    text = printable(body.decode("utf-8", errors="replace").strip())
    return f"answered {response.status} {text or response.reason or ''}".strip()


def _dial_reason(url: str, exc: Exception) -> str:
    if isinstance(exc, aiohttp.ClientConnectorDNSError):
        return f"the name {exc.host} does not resolve"
    if isinstance(exc, OSError) and exc.errno == errno.ECONNREFUSED:
        return f"nothing listens at {url} (connection refused)"
    return printable(f"{url}: {exc or type(exc).__name__}")


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


def _address(peername: object) -> str:
    if isinstance(peername, tuple) and len(peername) >= 2:
        host = f"[{peername[0]}]" if ":" in str(peername[0]) else peername[0]
        return f"{host}:{peername[1]}"
    return str(peername)
