"""Regions in one process: the daemons' real attachments and exchanges, joined without a network.

The event loop runs in a thread of its own; ranks attach from the test's thread, over real sockets.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from geotrain.daemon.attachments import Attachments, Served
from geotrain.daemon.exchange import Exchange
from geotrain.daemon.routing import Board, routes
from geotrain.transport.attachment import Attachment
from geotrain.transport.flow import Ring
from geotrain.transport.messages import Message, Presence, view_id

TIMEOUT_S = 30.0
T = TypeVar("T")


class LocalLink:
    """One end of a link whose wire is a call: credit is checked as a real one would."""

    def __init__(self, loop: asyncio.AbstractEventLoop, exchange: Exchange) -> None:
        self.peer = self
        self._loop = loop
        self._exchange = exchange
        self._view = 0
        self._rings: dict[int, tuple[memoryview, Ring]] = {}
        self._starts: dict[tuple[int, int], int] = {}
        self._early: list[tuple[Message, memoryview | None]] = []

    def publish(self, entry: Presence) -> None:
        self._loop.call_soon(self.peer._exchange.on_link_board, [entry])

    def open_view(
        self, view: int, sends: Mapping[int, int], receives: Mapping[int, memoryview]
    ) -> None:
        self._view = view
        self._rings = {stream: (ring, Ring(len(ring))) for stream, ring in receives.items()}
        self._starts.clear()
        early, self._early = self._early, []
        for message, payload in early:
            self._receive(message, payload)

    def close_view(self) -> None:
        self._view = 0
        self._rings.clear()

    def offer(self, message: Message, payload: memoryview | None) -> None:
        self._loop.call_soon(self.peer._receive, message, payload)

    def release(self, stream: int, view: int, seqs: Sequence[int]) -> None:
        for seq in seqs:
            start = self._starts.pop((stream, seq), None)
            if start is not None:
                self._rings[stream][1].free(start)
        acked = self.peer._exchange.on_link_acked
        self._loop.call_soon(acked, stream, view, list(seqs), [1] * len(seqs))

    def stats(self) -> Mapping[str, Any]:
        return {"state": "connected", "reason": ""}

    def _receive(self, message: Message, payload: memoryview | None) -> None:
        if self._view != message.view:
            self._early.append((message, payload))
            return
        start = 0
        if payload is not None:
            memory, ring = self._rings[message.stream]
            start = self._starts[message.stream, message.seq] = ring.allocate(len(payload))
            memory[start : start + len(payload)] = payload
        record = {**message.to_map(), "start": start}
        self._exchange.on_link_delivered(Message.from_map(record, with_start=True))


class LocalLine:
    """The daemons of a line of regions named a, b, c ..., in this process."""

    def __init__(self, folder: Path, num_regions: int) -> None:
        self.names = [chr(ord("a") + index) for index in range(num_regions)]
        self.exchanges: list[Exchange] = []
        self.attachments: list[Attachments] = []
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        # One worker, so that `settle` comes after everything that was handed to it before.
        self._loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
        self._listeners: list[socket.socket] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="daemons")
        for index in range(num_regions):
            self._add_region(index)
        for index in range(num_regions - 1):
            here = LocalLink(self._loop, self.exchanges[index])
            there = LocalLink(self._loop, self.exchanges[index + 1])
            here.peer, there.peer = there, here
            self.exchanges[index].add_link(self.names[index + 1], here)
            self.exchanges[index + 1].add_link(self.names[index], there)
            # As links do when they connect.
            self.exchanges[index].on_link_board(self.exchanges[index + 1].board.entries)
            self.exchanges[index + 1].on_link_board(self.exchanges[index].board.entries)
        self._thread.start()

    def _add_region(self, index: int) -> None:
        own = routes(index, len(self.names))
        board = Board(self.names, self.names[index])
        exchange = Exchange(board, self.names, own)
        served = Served(
            region=self.names[index], run_hash="hash", version="1.0", routes=own, silent_s=10.0
        )
        attachments = Attachments(served, exchange)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.socket_path(index)))
        listener.listen(8)
        listener.setblocking(False)
        self._listeners.append(listener)
        self.exchanges.append(exchange)
        self.attachments.append(attachments)
        attachments.listen(self._loop, listener)

    def socket_path(self, index: int) -> Path:
        return self._folder / f"{self.names[index]}.sock"

    def attach(self, index: int, *, arena_bytes: int = 1 << 20, **changes: Any) -> Attachment:
        own = routes(index, len(self.names))
        arguments: dict[str, Any] = {
            "run_hash": "hash",
            "version": "1.0",
            "region": self.names[index],
            "rank": 0,
            "world_size": 1,
            "arena_bytes": arena_bytes,
            "streams_in": [route.receives for route in own],
            "streams_out": [route.sends for route in own],
            "timeout_s": TIMEOUT_S,
        }
        return Attachment.connect(self.socket_path(index), **{**arguments, **changes})

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function on the daemons' loop."""

        async def on_loop() -> T:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(TIMEOUT_S)

    def stacks(self, index: int) -> dict[int, str]:
        asked = self.attachments[index].stacks(TIMEOUT_S)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result(TIMEOUT_S)

    def settle(self) -> None:
        """Wait for what the loop handed to its worker, such as unmapping an arena."""

        async def on_worker() -> None:
            await self._loop.run_in_executor(None, lambda: None)

        asyncio.run_coroutine_threadsafe(on_worker(), self._loop).result(TIMEOUT_S)

    def pause(self) -> threading.Event:
        """Stop the loop until the event is set: daemons that read nothing."""
        resume = threading.Event()
        self._loop.call_soon_threadsafe(resume.wait, TIMEOUT_S)
        return resume

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        resume = self.pause()
        try:
            yield
        finally:
            resume.set()

    def close_daemon(self, index: int) -> None:
        self.call(self.attachments[index].close)

    def close(self) -> None:
        for attachments in self.attachments:
            self.call(attachments.close)
        self.settle()
        stopped = self._loop.shutdown_default_executor()
        asyncio.run_coroutine_threadsafe(stopped, self._loop).result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()
        for listener in self._listeners:
            listener.close()


@contextlib.contextmanager
def local_line(folder: Path, num_regions: int) -> Iterator[LocalLine]:
    line = LocalLine(folder, num_regions)
    try:
        yield line
    finally:
        line.close()


def open_views(*attachments: Attachment) -> int:
    """Make every rank ready and open the view that this forms, as a pipeline does."""
    for attachment in attachments:
        attachment.ready({})
    # A board may still have a region as it was before, ready too.
    present = {name: one.board()[name].incarnation for one in attachments for name in [one.region]}
    view = 0
    for attachment in attachments:
        assert attachment.wait(lambda a=attachment: all_ready(a, present), timeout_s=TIMEOUT_S), (
            attachment.board()
        )
        board = attachment.board()
        view = view_id([entry.incarnation for entry in board.values()])
        rings = {stream: size for entry in board.values() for stream, size in entry.rings.items()}
        attachment.open_view(view, rings)
    return view


def all_ready(attachment: Attachment, present: Mapping[str, int] | None = None) -> bool:
    """Whether its board has every region as ready, and those of `present` with this incarnation."""
    board = attachment.board()
    is_present = all(board[name].incarnation == number for name, number in (present or {}).items())
    return is_present and all(entry.state == "ready" for entry in board.values())


def wait_for_state(attachment: Attachment, region: str, state: str) -> Presence:
    """The board entry of `region` once it is in `state`."""
    reached = attachment.wait(
        lambda: attachment.board()[region].state == state, timeout_s=TIMEOUT_S
    )
    assert reached, attachment.board()[region]
    return attachment.board()[region]
