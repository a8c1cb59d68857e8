"""Asks the daemons for their status and the lab for its history, again and again."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from geotrain.lab.demo.state import RunState
from geotrain.lab.emulator.sites import LabFailedError
from geotrain.lab.wan import Wan


class Feed:
    """What it hears goes into the state; one that does not answer holds up nobody else."""

    def __init__(
        self,
        state: RunState,
        wan: Wan,
        status_ports: Sequence[str],
        *,
        answer_limit_s: float = 5.0,
    ) -> None:
        """
        Args:
            status_ports: host:port of each region's status page, within its site.
        """
        self._state = state
        self._wan = wan
        self._addresses = [_address(text) for text in status_ports]
        self._answer_limit_s = answer_limit_s
        self._asks: list[Callable[[], Awaitable[None]]] = [self._ask_lab]
        self._asks += [partial(self._ask, index) for index in range(len(self._addresses))]

    async def run(self, *, interval_s: float) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for ask in self._asks:
                group.create_task(_repeat(ask, interval_s))

    async def ask_all(self) -> None:
        """Once, everyone; returns when all have answered, or had their time."""
        await asyncio.gather(*(ask() for ask in self._asks))

    async def _ask_lab(self) -> None:
        with contextlib.suppress(LabFailedError):  # the daemons' end will tell, and why
            status = await asyncio.to_thread(self._wan.status)
            self._state.changes.on_events(status["events"])

    async def _ask(self, index: int) -> None:
        status = await self._status(index)
        if status is not None:
            self._state.on_status(index, status, now=time.monotonic())

    async def _status(self, index: int) -> Mapping[str, Any] | None:
        """A daemon's status page, or None when it does not answer."""
        host, port = self._addresses[index]
        sock = self._wan.socket(self._state.options.names[index])
        sock.setblocking(False)
        with contextlib.ExitStack() as stack:
            stack.callback(sock.close)
            try:
                async with asyncio.timeout(self._answer_limit_s):
                    await asyncio.get_running_loop().sock_connect(sock, (host, port))
                    reader, writer = await asyncio.open_connection(sock=sock)
                    stack.pop_all()  # the socket is the connection's now
                    stack.callback(writer.close)
                    writer.write(f"GET /status HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                    answer = await reader.read()
                _, _, body = answer.partition(b"\r\n\r\n")
                status: dict[str, Any] = json.loads(body)
            except (OSError, TimeoutError, json.JSONDecodeError):
                return None
        return status


async def _repeat(ask: Callable[[], Awaitable[None]], interval_s: float) -> None:
    while True:
        await ask()
        await asyncio.sleep(interval_s)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)
