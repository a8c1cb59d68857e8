"""Strangers at a port where TLS is spoken: each has to show a good certificate, and soon.

asyncio could listen with TLS by itself, but would tell nobody why it turned someone away.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable

from geotrain.transport.http_carrier import address
from geotrain.transport.tls import Tls, reason_of

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 256
"""At once; a handshake holds 256 KiB. The 65 lanes of two neighbours fit."""
SAY_AGAIN_S = 60.0
"""A scanner must not fill the log: the same reason is told once in that time."""


class TlsArrivals:
    """Shakes hands with whoever connects, then lets a visitor in."""

    def __init__(
        self, tls: Tls, make_visitor: Callable[[], asyncio.Protocol], *, limit_s: float
    ) -> None:
        self._tls = tls
        self._make_visitor = make_visitor
        self._limit_s = limit_s
        self._tasks = set[asyncio.Task[None]]()
        self._told = dict[str, float]()

    def welcome(self) -> asyncio.Protocol:
        """The protocol of one that connects."""
        return _Doorstep(self._begin)

    async def close(self) -> None:
        """Turn away who is still shaking hands."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, tcp: asyncio.Transport) -> None:
        if len(self._tasks) >= MAX_HANDSHAKES:
            tcp.abort()
            return
        task = asyncio.get_running_loop().create_task(self._shake_hands(tcp))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, tcp: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        hall = _Hall()
        try:
            secured = await loop.start_tls(
                tcp,
                hall,
                self._tls.server,
                server_side=True,
                ssl_handshake_timeout=self._limit_s,
            )
        except ssl.SSLError as error:
            self.tell(address(tcp.get_extra_info("peername")), reason_of(error))
            return
        except OSError:
            return  # It went, or said nothing for too long: of no interest, and many do.
        if secured is None or hall.is_empty:
            return  # It went in the very turn in which the handshake ended.
        visitor = self._make_visitor()
        secured.set_protocol(visitor)
        visitor.connection_made(secured)
        if hall.received:
            visitor.data_received(bytes(hall.received))

    def tell(self, peer: str, reason: str) -> None:
        """Log why somebody was turned away."""
        now = asyncio.get_running_loop().time()
        if now - self._told.get(reason, -SAY_AGAIN_S) >= SAY_AGAIN_S:
            self._told[reason] = now
            logger.warning("! %s was turned away: %s", peer, reason)


class _Doorstep(asyncio.Protocol):
    """Reads nothing, so that every byte is left for TLS."""

    def __init__(self, begin: Callable[[asyncio.Transport], None]) -> None:
        self._begin = begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._begin(transport)


class _Hall(asyncio.Protocol):
    """Keeps what came with the last word of the handshake, until the visitor is there."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.is_empty = False
        """Whether the connection is gone."""

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_empty = True
