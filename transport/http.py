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
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp
from aiohttp import http_exceptions, web
from aiohttp.typedefs import Handler

from geotrain.transport.carrier import Carrier, DialError
from geotrain.transport.congestion import AUTO
from geotrain.transport.http_carrier import HttpCarrier, address
from geotrain.transport.messages import MAX_NAME_CHARS, printable
from geotrain.transport.tls import Tls, failure, names_of, other_name, turned_away
from geotrain.transport.tls_arrivals import TlsArrivals

PATH = "/link"
UPGRADE = "geotrain/1"
FROM_HEADER, TO_HEADER = "Geotrain-From", "Geotrain-To"
MAX_REASON_BYTES = 1_024
SHUTDOWN_TIMEOUT_S = 2.0
FIRST_REQUEST_S = 10.0
"""How long a connection may say nothing before it has asked for anything; as long for TLS."""


class _NoNonsense(logging.Filter):
    """Whoever reaches the port can send nonsense; a traceback of each would bury our own lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, http_exceptions.HttpProcessingError)


_VISITORS = logging.getLogger("geotrain.transport.http.visitors")
_VISITORS.addFilter(_NoNonsense())
_RESPONSE = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n"


@asynccontextmanager
async def dial(
    url: str,
    *,
    region: str,
    to: str,
    timeout_s: float,
    congestion: str = AUTO,
    tls: Tls | None = None,
) -> AsyncIterator[Carrier]:
    """Connect to the daemon of region `to`; the connection ends with the context.

    Args:
        congestion: See congestion.py; what it was refused is told by the carrier.
        tls: For an https:// url, and for no other.

    Raises:
        DialError: With the reason for people, within `timeout_s`.
    """
    assert (tls is not None) == url.startswith("https:"), "the config sees to it"
    if tls is not None and time.time() > tls.not_after_s:
        raise DialError(
            f"{tls.files.certificate} expired on {tls.ends}; renew it, then start again",
            is_lasting=True,
        )
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
                    url.rstrip("/") + PATH,
                    headers=headers,
                    allow_redirects=False,
                    ssl=tls.client if tls is not None else True,
                    # Not the address: that may change, and says nothing of who is there.
                    server_hostname=to if tls is not None else None,
                )
                if response.status != 101:
                    refuses = response.status in (403, 426)
                    raise DialError(await _answer(response), is_lasting=refuses)
                names = names_of(_certificate(response.connection))
                if tls is not None and to not in names:
                    # OpenSSL compares without regard to case.
                    response.close()
                    raise DialError(other_name(url, to, names), is_lasting=True)
        except TimeoutError as exc:
            raise DialError(f"no answer from {url} within {timeout_s:g} s") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise _dial_error(url, to, tls, exc) from exc
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

    def __init__(self, *, congestion: str = AUTO, tls: Tls | None = None) -> None:
        self._congestion = congestion
        self._tls = tls
        self._arrivals: TlsArrivals | None = None
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
            self._listening = await loop.create_server(self._make_welcome(), host, port)
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
        if self._arrivals is not None:
            arrivals, self._arrivals = self._arrivals, None
            await arrivals.close()
        for timer in self._silent.values():
            timer.cancel()
        self._silent.clear()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _make_welcome(self) -> Callable[[], asyncio.BaseProtocol]:
        if self._tls is None:
            return self._welcome
        self._arrivals = TlsArrivals(self._tls, self._welcome, limit_s=FIRST_REQUEST_S)
        return self._arrivals.welcome

    def _welcome(self) -> web.RequestHandler:
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
        if self._tls is not None:
            names = names_of(_certificate(request))
            if region not in names:
                text = f"the certificate names {', '.join(names) or 'nothing'}, not {region!r}"
                if self._arrivals is not None and request.transport is not None:
                    who = address(request.transport.get_extra_info("peername"))
                    self._arrivals.tell(who, printable(text))
                return web.Response(status=403, text=text + "\n")
        link = self._links(region)
        if link is None:
            return web.Response(status=403, text=f"region {region!r} is no peer of this daemon\n")
        transport = request.transport
        if transport is None:
            return web.Response(status=400)
        assert isinstance(transport, asyncio.Transport)
        try:
            carrier = HttpCarrier(transport, request.protocol, congestion=self._congestion)
        except ConnectionResetError:
            return web.Response(status=400)  # Nobody is there to read it.
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
    try:
        return HttpCarrier(connection.transport, connection.protocol, congestion=congestion)
    except ConnectionResetError as exc:
        raise DialError(f"{url} closed the connection as it was handed over") from exc


async def _answer(response: aiohttp.ClientResponse) -> str:
    body = await response.content.read(MAX_REASON_BYTES)
    text = printable(body.decode("utf-8", errors="replace").strip())
    return f"answered {response.status} {text or response.reason or ''}".strip()


def _certificate(end: web.Request | aiohttp.connector.Connection | None) -> dict[str, Any] | None:
    """What the peer showed."""
    transport = end.transport if end is not None else None
    return transport.get_extra_info("peercert") if transport is not None else None


def _dial_error(url: str, to: str, tls: Tls | None, exc: Exception) -> DialError:
    if isinstance(exc, aiohttp.ClientConnectorDNSError):
        return DialError(f"the name {exc.host} does not resolve")
    if isinstance(exc, OSError) and exc.errno == errno.ECONNREFUSED:
        return DialError(f"nothing listens at {url} (connection refused)")
    for error in (exc.__cause__, exc):  # aiohttp makes errors of ssl its own
        if tls is not None and isinstance(error, ssl.SSLError):
            return DialError(failure(error, url=url, to=to, tls=tls), is_lasting=True)
    if isinstance(exc, aiohttp.ServerDisconnectedError | ConnectionResetError):
        if tls is not None:
            return DialError(turned_away(url, to, tls), is_lasting=True)
        return DialError(
            f"{url} closed the connection without an answer; if it speaks TLS, this site needs "
            "[site.tls] and an https:// url, too",
            is_lasting=True,
        )
    if isinstance(exc, aiohttp.ClientConnectorError):
        # aiohttp's own text has an SSLContext's address in memory in it.
        if isinstance(exc.os_error, ConnectionResetError):
            return DialError(
                f"{url} reset the connection as it began, as a daemon does to whose port too many "
                "connect at once, or a firewall on the way"
            )
        return DialError(printable(f"{url} cannot be reached: {exc.strerror or exc.os_error}"))
    return DialError(printable(f"{url}: {exc or type(exc).__name__}"))
