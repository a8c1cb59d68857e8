"""One end of the link that `geotrain bench link` measures: a real Link, arenas, and no rank.

    wait for the lane | control records alone | bulk, not counted | bulk, counted | exchange figures

The end with index 0 leads: it begins each part and measures the round trips; the other one answers.
Control records are messages of their own streams, as a rank's are, and come back as such.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from geotrain.errors import GeotrainError
from geotrain.lab.bench.link_counts import Counts
from geotrain.lab.bench.link_options import EndPlan
from geotrain.observability.metrics import LAG_INTERVAL_S
from geotrain.transport.arena import Arena
from geotrain.transport.hello import Hello
from geotrain.transport.http import LinkServer
from geotrain.transport.link import Link, LinkSettings
from geotrain.transport.messages import FORWARD, Message, Presence, stream_id, view_id
from geotrain.transport.tls import TlsFiles, load_tls
from geotrain.version import __version__

_BULK, _CONTROL = 0, 1
"""Which boundary's streams carry what; each has one of them a direction."""
_VIEW = view_id([1, 1])
_PING_INTERVAL_S = 0.02
_MOST_PINGS = 256
"""Unanswered; while the link is down there is nothing to learn from more of them."""
_STALL_LIMIT_S = 120.0
_EXCHANGE_LIMIT_S = 30.0
_LOOK_INTERVAL_S = 0.25
_FILL_BYTES = 1 << 20
_DONE = "measured"


class EndFailedError(GeotrainError):
    """The link did not come about, stalled or failed; says what was waited for."""


class NoCoder:
    """The codec "none": every chunk goes raw."""

    def encode(self, raw: memoryview) -> bytes | None:
        return None

    def decode_into(self, coded: memoryview, out: memoryview) -> None:
        raise ValueError("nothing is coded here")


def make_arena(num_bytes: int) -> Arena:
    """What a rank would share with its daemon, filled with bytes that no coding shrinks."""
    arena, descriptor = Arena.create(num_bytes)
    os.close(descriptor)
    noise = Random(num_bytes).randbytes(_FILL_BYTES)
    for start in range(0, num_bytes, _FILL_BYTES):
        piece = arena.view(start, min(_FILL_BYTES, num_bytes - start))
        piece[:] = noise[: piece.nbytes]
    return arena


class End:
    """One end, for one measurement; `run` is all there is to call."""

    def __init__(self, plan: EndPlan) -> None:
        traffic = plan.traffic
        self._plan, self._traffic = plan, traffic
        self._leads = plan.index == 0
        self._sends = self._leads or traffic.both_ways
        self._receives = not self._leads or traffic.both_ways
        self._bulk_out, self._bulk_in = _streams(_BULK, plan.index)
        self._control_out, self._control_in = _streams(_CONTROL, plan.index)
        ring_bytes = traffic.num_slots * traffic.message_bytes
        self._out = make_arena(ring_bytes) if self._sends else None
        self._in = make_arena(ring_bytes) if self._receives else None
        self._control_ring = memoryview(bytearray(os.sysconf("SC_PAGE_SIZE")))
        self._changed = asyncio.Event()
        self._failure = ""
        self._num_offered = {self._bulk_out: 0, self._control_out: 0}
        self._num_acked = {self._bulk_out: 0, self._control_out: 0}
        self._counts = Counts(traffic, sends=self._sends, receives=self._receives)
        self._stopped = False
        self._pings: dict[bytes, tuple[float, bool]] = {}
        self._theirs: dict[str, Any] | None = None
        self._tls = None
        if plan.tls is not None:
            files = TlsFiles(**{key: Path(path) for key, path in plan.tls.items()})
            self._tls = load_tls(files, region=plan.region)
        self._link = self._make_link()

    async def run(
        self, *, connect_limit_s: float, on_listening: Callable[[int], None]
    ) -> dict[str, dict[str, Any]]:
        """Measure once. Returns each region's figures.

        Raises:
            EndFailedError: Something that was waited for did not come.
            OSError: The address to listen on cannot be had.
        """
        server = LinkServer(congestion=self._traffic.congestion, tls=self._tls)
        await server.start(self._plan.host, self._plan.port, {self._plan.peer: self._link}.get)
        try:
            on_listening(server.port)
            self._open_view()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._link.run()), group.create_task(self._watch())]
                if self._leads:
                    tasks.append(group.create_task(self._ping()))
                figures = await self._measure(connect_limit_s)
                await self._link.close(_DONE)
                for task in tasks:
                    task.cancel()
            return figures
        except* GeotrainError as group_error:
            raise group_error.exceptions[0] from None
        finally:
            await server.close()

    # The parts, one after another ----------------------------------------------------------------

    async def _measure(self, connect_limit_s: float) -> dict[str, dict[str, Any]]:
        traffic = self._traffic
        await self._until(
            lambda: self._link.stats()["state"] == "connected",
            limit_s=connect_limit_s,
            what="no link",
        )
        if self._leads:
            await asyncio.sleep(traffic.idle_s)
            self._send_control("begin")
            self._begin()
        else:
            await self._until(
                lambda: self._counts.has_begun,
                limit_s=_STALL_LIMIT_S + traffic.idle_s,
                what="no word from the other end",
            )
        await self._until(
            lambda: self._counts.is_done,
            limit_s=_STALL_LIMIT_S + traffic.warm_up_s + traffic.seconds,
            what=f"no {traffic.seconds:g} s of messages of {traffic.message_bytes} bytes",
        )
        self._stopped = True
        stats = self._link.stats()
        # Bulk's: the connection for control has one of its own.
        congestion = sorted({row["congestion"] for row in stats["lanes"]})
        figures = {**self._counts.figures(), "tls": stats["tls"], "congestion": congestion}
        return await self._exchange(figures)

    async def _exchange(self, mine: dict[str, Any]) -> dict[str, dict[str, Any]]:
        number = self._send_control("figures", json.dumps(mine).encode())
        await self._until(
            lambda: (
                self._theirs is not None
                and (self._num_acked[self._control_out] > number or self._was_closed())
            ),
            # Behind what the other end has still under way.
            limit_s=_EXCHANGE_LIMIT_S + _STALL_LIMIT_S,
            what="no figures from the other end",
        )
        assert self._theirs is not None
        if not self._leads:
            # Who closes first takes the acknowledgement with it that the other one waits for.
            await self._until(
                lambda: self._link.stats()["state"] != "connected",
                limit_s=_EXCHANGE_LIMIT_S,
                what="no end of the link",
            )
        return {self._plan.region: mine, self._plan.peer: self._theirs}

    def _was_closed(self) -> bool:
        """The other end had all it wanted; the acknowledgement may have gone with its lane."""
        return str(self._link.stats()["reason"]).endswith(_DONE)

    def _begin(self) -> None:
        self._counts.begin(now=time.monotonic())
        self._fill()

    async def _until(self, ready: Callable[[], bool], *, limit_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not ready():
                    stats = self._link.stats()
                    if stats["state"] == "refused":
                        raise EndFailedError(f"refused: {stats['reason']}")
                    if self._failure:
                        raise EndFailedError(self._failure)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            stats = self._link.stats()
            state = f"the link to {self._plan.peer} is {stats['state']}"
            state += f": {stats['reason']}" if stats["reason"] else ""
            raise EndFailedError(f"{what} within {limit_s:.0f} s; {state}") from error

    # Beside them ---------------------------------------------------------------------------------

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_INTERVAL_S)
            is_up = self._link.stats()["state"] == "connected"
            if is_up and not self._stopped and len(self._pings) < _MOST_PINGS:
                number = self._num_offered[self._control_out].to_bytes(8, "little")
                self._pings[number] = (time.monotonic(), not self._counts.has_begun)
                self._send_control("ping", number)

    async def _watch(self) -> None:
        """The loop's lag, and what TCP repeats."""
        loop = asyncio.get_running_loop()
        look_at = loop.time()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            now = loop.time()
            self._counts.on_lag(now - due)
            if now >= look_at:
                look_at = now + _LOOK_INTERVAL_S
                self._counts.look()

    # The link ------------------------------------------------------------------------------------

    def _make_link(self) -> Link:
        plan = self._plan
        return Link(
            hello=Hello(
                version=__version__,
                run_id=plan.run_id,
                region=plan.region,
                index=plan.index,
                to=plan.peer,
                boot=time.time_ns(),
                run=plan.run,
            ),
            peer=plan.peer,
            url=plan.url,
            tls=self._tls if plan.url is not None else None,
            coder=NoCoder(),
            settings=LinkSettings(
                congestion=self._traffic.congestion, num_lanes=self._traffic.lanes
            ),
            board=list[Presence],
            on_board=lambda entries: None,
            on_delivered=self._on_delivered,
            on_acked=self._on_acked,
            on_state=self._changed.set,
            on_failed=self._on_failed,
        )

    def _open_view(self) -> None:
        ring_bytes = self._traffic.num_slots * self._traffic.message_bytes
        sends = {self._control_out: self._control_ring.nbytes}
        receives = {self._control_in: self._control_ring}
        if self._sends:
            sends[self._bulk_out] = ring_bytes
        if self._in is not None:
            receives[self._bulk_in] = self._in.memory
        self._link.open_view(_VIEW, sends, receives)

    def _fill(self) -> None:
        """Offer bulk until as much is under way as there are slots."""
        assert self._out is not None or not self._sends
        while self._out is not None and not self._stopped:
            number = self._num_offered[self._bulk_out]
            if number - self._num_acked[self._bulk_out] >= self._traffic.num_slots:
                return
            size = self._traffic.message_bytes
            slot = self._out.view(number % self._traffic.num_slots * size, size)
            self._offer(self._bulk_out, "forward", slot, b"")

    def _send_control(self, kind: str, header: bytes = b"") -> int:
        return self._offer(self._control_out, kind, None, header)

    def _offer(self, stream: int, kind: str, payload: memoryview | None, header: bytes) -> int:
        number = self._num_offered[stream]
        self._num_offered[stream] += 1
        message = Message(
            stream=stream,
            view=_VIEW,
            seq=number,
            kind=kind,
            step=0,
            microbatch=number if payload is not None else -1,
            header=header,
            payload_bytes=0 if payload is None else payload.nbytes,
        )
        self._link.offer(message, payload)
        return number

    def _on_delivered(self, message: Message) -> None:
        self._link.release(message.stream, message.view, [message.seq])
        if message.stream == self._bulk_in:
            self._counts.on_received(message.payload_bytes, now=time.monotonic())
        elif message.kind == "ping":
            self._send_control("pong", message.header)
        elif message.kind == "pong":
            self._on_pong(message.header)
        elif message.kind == "begin":
            self._begin()
        elif message.kind == "figures":
            self._theirs = json.loads(message.header)
        self._changed.set()

    def _on_pong(self, number: bytes) -> None:
        sent_at, was_idle = self._pings.pop(number)  # each comes back once (P-5)
        self._counts.on_round_trip(time.monotonic() - sent_at, was_idle=was_idle)

    def _on_acked(self, stream: int, view: int, seqs: list[int], wire_bytes: list[int]) -> None:
        self._num_acked[stream] += len(seqs)
        if stream == self._bulk_out:
            num_bytes = len(seqs) * self._traffic.message_bytes
            self._counts.on_sent(num_bytes, now=time.monotonic())
            self._fill()
        self._changed.set()

    def _on_failed(self, view: int, reason: str) -> None:
        self._failure = f"the link to {self._plan.peer} failed: {reason}"
        self._changed.set()


def _streams(boundary: int, index: int) -> tuple[int, int]:
    """The outgoing and the incoming stream of this end."""
    forward, back = stream_id(boundary, FORWARD), stream_id(boundary, 1 - FORWARD)
    return (forward, back) if index == 0 else (back, forward)
