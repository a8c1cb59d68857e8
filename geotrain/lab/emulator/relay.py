"""An emulated wide-area link: a TCP relay that delays, limits the rate and can be cut.

The shapers decide when a byte leaves; the relay moves the bytes. Where a shaper is full the relay
stops reading, so that the sender's TCP feels a full link.
"""

import asyncio
import contextlib
import logging
import math
import socket
from random import Random

from geotrain.lab.emulator.shaper import Shaper, Wire
from geotrain.lab.settings import LinkSettings

logger = logging.getLogger(__name__)

# Without a bound of its own the kernel would add megabytes of queue in front of the emulated one.
_RECEIVE_BUFFER_BYTES = 256 << 10
_AIM_LIMIT_S = 30.0
_CONNECT_LIMIT_S = 10.0
_EARLY_S = 0.0005
"""Timers fire up to a millisecond late, so what is due within half of one leaves at once."""


class _End(asyncio.Protocol):
    """One socket of a relayed connection; `peer` is the socket that its bytes go to."""

    def __init__(self, relay: "Relay", *, forward: bool) -> None:
        self._relay = relay
        self._loop = asyncio.get_running_loop()
        self._forward = forward
        self._shaper = Shaper(relay.settings(forward=forward), relay.rng, relay.wires[forward])
        self._timer: asyncio.TimerHandle | None = None
        self._writable = True
        self._ended = False
        self.transport: asyncio.Transport | None = None
        self.peer: _End | None = None
        self.end_delivered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._relay._joined(self)

    def data_received(self, data: bytes) -> None:
        self._shaper.push(data, now=self._loop.time())
        self.deliver()

    def eof_received(self) -> bool:
        self._end()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._relay._left(self)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self.peer is not None:
            self.peer.deliver()

    def change(self) -> None:
        self._shaper.change(self._relay.settings(forward=self._forward))
        self.deliver()

    def deliver(self) -> None:
        """Write what is due to the other socket, and come back for the rest in time."""
        self._stop_timer()
        peer, times = self.peer, []
        stalled = self._relay.stalled or self._relay.settings(forward=self._forward).cut
        if peer is not None and peer._writable and not stalled:
            for segment in self._shaper.pop_due(now=self._loop.time() + _EARLY_S):
                self._write(peer, segment)
            times.append(self._shaper.next_due())
        times.append(self._pace_reading())
        wake_at = min((at for at in times if at is not None), default=math.inf)
        if wake_at < math.inf:
            self._timer = self._loop.call_at(wake_at, self.deliver)

    def drop(self) -> None:
        self._stop_timer()
        if self.transport is not None:
            self.transport.abort()

    def _write(self, peer: "_End", segment: memoryview | None) -> None:
        assert self.transport is not None and peer.transport is not None
        if segment is not None:
            if not peer.transport.is_closing():
                self._relay.num_bytes[self._forward] += len(segment)
                peer.transport.write(segment)
            return
        self.end_delivered = True
        if self.transport.is_closing() or peer.end_delivered:
            peer.transport.close()
            self.transport.close()
        else:
            with contextlib.suppress(OSError):  # It was reset; connection_lost is on its way.
                peer.transport.write_eof()

    def _pace_reading(self) -> float | None:
        """Read or not; returns when to look again."""
        if self.transport is None or self.transport.is_closing() or self._ended:
            return None
        full_until = self._shaper.full_until(now=self._loop.time())
        if full_until is None:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()
        return full_until

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._ended = True
        self._shaper.push_end(now=self._loop.time())
        self.deliver()


class Relay:
    """Relays every connection to its port to the target.

    `forward` is the direction from who connects to the target, `back` the other; alike by default.
    """

    def __init__(
        self,
        forward: LinkSettings,
        back: LinkSettings | None = None,
        *,
        seed: int = 0,
        wires: tuple[Wire, Wire] | None = None,
    ) -> None:
        self._settings = (forward if back is None else back, forward)
        self.rng = Random(seed)
        self.wires = wires or (Wire(), Wire())
        """Back and forward; relays of the same link share them, and with them its rate."""
        self.num_bytes = [0, 0]
        """Delivered back and forward."""
        self.stalled = False
        self._cut = False
        self._server: asyncio.Server | None = None
        self._target: asyncio.Future[tuple[str, int]] | None = None
        self._ends: set[_End] = set()
        self._dials: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; connections wait until `aim` names the target. Returns the port."""
        loop = asyncio.get_running_loop()
        self._target = loop.create_future()
        sock = socket.create_server((host, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._server = await loop.create_server(lambda: _Accepted(self, forward=True), sock=sock)
        bound_port: int = sock.getsockname()[1]
        return bound_port

    def aim(self, host: str, port: int) -> None:
        """Name the listening end; once."""
        assert self._target is not None, "start() first"
        self._target.set_result((host, port))

    def settings(self, *, forward: bool) -> LinkSettings:
        return self._settings[forward]

    def change(self, forward: LinkSettings, back: LinkSettings | None = None) -> None:
        """New settings, also for the connections that are open; a cut direction holds its bytes."""
        self._settings = (forward if back is None else back, forward)
        for end in tuple(self._ends):
            end.change()

    def cut(self) -> None:
        """Reset every connection and refuse new ones until `mend`."""
        self._cut = True
        for end in tuple(self._ends):
            end.drop()

    def reset_one(self) -> None:
        """Reset one connection, whichever the seed says; the others go on."""
        joined = [end for end in self._ends if end.peer is not None]
        if joined:
            end = self.rng.choice(joined)
            assert end.peer is not None
            end.drop()
            end.peer.drop()

    def stall(self) -> None:
        """Deliver nothing more, as when a middlebox forgets a connection: nobody is told."""
        self.stalled = True

    def mend(self) -> None:
        self._cut = self.stalled = False
        for end in tuple(self._ends):
            end.deliver()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for dial in self._dials:
            dial.cancel()
        for end in tuple(self._ends):
            end.drop()
        await asyncio.gather(*self._dials, return_exceptions=True)
        if self._target is not None:
            self._target.cancel()
        await asyncio.sleep(0)  # The loop closes an aborted socket in its next turn.

    def _joined(self, end: _End) -> None:
        self._ends.add(end)

    def _left(self, end: _End) -> None:
        self._ends.discard(end)

    def _dial_for(self, accepted: _End) -> None:
        if self._cut:
            accepted.drop()
            return
        dial = asyncio.get_running_loop().create_task(self._dial(accepted))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)

    async def _dial(self, accepted: _End) -> None:
        assert self._target is not None
        try:
            target = await asyncio.wait_for(asyncio.shield(self._target), _AIM_LIMIT_S)
            dialled = await asyncio.wait_for(self._connect(target), _CONNECT_LIMIT_S)
        except (OSError, TimeoutError) as exc:
            logger.warning("x relay cannot reach its target: %s", exc or "timed out")
            accepted.drop()
            return
        if self._cut or accepted not in self._ends:
            dialled.drop()
            accepted.drop()
            return
        accepted.peer, dialled.peer = dialled, accepted
        accepted.deliver()
        dialled.deliver()

    async def _connect(self, target: tuple[str, int]) -> _End:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            sock.setblocking(False)
            await loop.sock_connect(sock, target)
            _, dialled = await loop.create_connection(lambda: _End(self, forward=False), sock=sock)
        except BaseException:
            sock.close()
            raise
        return dialled


class _Accepted(_End):
    """The socket that the dialling side opened."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._relay._dial_for(self)


async def measure_rtt_s(settings: LinkSettings, *, count: int = 5, timeout_s: float) -> list[float]:
    """What the emulation really does on this machine: round trips of a byte to an echo and back."""
    loop = asyncio.get_running_loop()
    relay = Relay(settings)
    echoes: list[_Echo] = []
    echo = await loop.create_server(lambda: _Echo(echoes), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(timeout_s):
            port = await relay.start()
            relay.aim("127.0.0.1", echo.sockets[0].getsockname()[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            rtts = []
            for index in range(count + 1):
                started = loop.time()
                writer.write(b"p")
                await reader.readexactly(1)
                if index:  # The first one also waits for the relay to dial.
                    rtts.append(loop.time() - started)
            writer.close()
            await writer.wait_closed()
    finally:
        echo.close()
        for end in echoes:
            end.transport.abort()
        await relay.close()
    return rtts


class _Echo(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, echoes: "list[_Echo]") -> None:
        self._echoes = echoes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._echoes.append(self)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)
