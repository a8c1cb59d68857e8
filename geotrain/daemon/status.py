"""The status page: /healthz, /status and /metrics over HTTP, for people and their tools."""

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from geotrain.errors import GeotrainError
from geotrain.observability.metrics import CONTENT_TYPE, Metrics

STACKS_TIMEOUT_S = 2.0
_SHUTDOWN_TIMEOUT_S = 1.0


class StatusPage:
    """Serves what `snapshot` returns.

    The address is loopback (config sees to that), but any web page in a browser on this machine
    could have it fetched: answers are therefore for tools only and carry no CORS header.
    """

    def __init__(
        self,
        snapshot: Callable[[], Mapping[str, Any]],
        stacks: Callable[[float], Awaitable[Mapping[int, str]]],
    ) -> None:
        self._snapshot = snapshot
        self._stacks = stacks
        self._metrics = Metrics(snapshot)
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one, `port` then says which.

        Raises:
            GeotrainError: The address cannot be had.
        """
        app = web.Application()
        app.router.add_get("/healthz", self._on_healthz)
        app.router.add_get("/status", self._on_status)
        app.router.add_get("/metrics", self._on_metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as exc:
            raise GeotrainError(
                f"cannot serve the status page on {host}:{port}: {os_reason(exc)}; "
                "stop what uses the port, or change site.status"
            ) from exc
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _on_healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _on_status(self, request: web.Request) -> web.Response:
        document = dict(self._snapshot())
        if request.query.get("stacks") == "1":
            stacks = await self._stacks(STACKS_TIMEOUT_S)
            document["stacks"] = {str(rank): text for rank, text in stacks.items()}
        return web.Response(text=json.dumps(document), content_type="application/json")

    async def _on_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def os_reason(exc: OSError) -> str:
    """The system's words alone: asyncio wraps them in a text that repeats the address."""
    if exc.errno is not None and exc.errno > 0:
        return os.strerror(exc.errno).lower()
    return exc.strerror or str(exc)
