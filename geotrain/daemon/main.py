"""One region's daemon: wires links, ranks and status page together, and ends in order.

Never imports torch. Everything runs on one event loop; coding alone runs on worker threads.
"""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

from geotrain.config import Config
from geotrain.configuration.rules import split_address
from geotrain.daemon.attachments import Attachments, Served
from geotrain.daemon.coding import make_coder, make_workers
from geotrain.daemon.descriptors import Shortage, raise_limit
from geotrain.daemon.egress import EgressMeter
from geotrain.daemon.egress_file import EgressFile
from geotrain.daemon.exchange import Exchange
from geotrain.daemon.place import Place
from geotrain.daemon.routing import Board, routes
from geotrain.daemon.status import StatusPage, os_reason
from geotrain.daemon.tls import site_tls, warnings
from geotrain.daemon.watch import TICK_S, Watch
from geotrain.errors import GeotrainError
from geotrain.observability.metrics import LAG_INTERVAL_S, LoopLag
from geotrain.transport.congestion import probe
from geotrain.transport.hello import Hello
from geotrain.transport.http import LinkServer
from geotrain.transport.link import Link, LinkSettings

logger = logging.getLogger(__name__)

GOODBYE_TIMEOUT_S = 2.0
"""For peers to take the reason why we go."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def run(config: Config) -> int:
    """Serve this region until SIGTERM or SIGINT; returns 0.

    Raises:
        GeotrainError: It cannot start: an address or the place is taken, or a file of [site.tls]
            cannot be used.
    """
    place = Place.claim(config.socket_path)
    try:
        asyncio.run(Daemon(config, place).run())
    finally:
        place.release()
    return 0


class Daemon:
    """Everything of one daemon, from start to end."""

    def __init__(self, config: Config, place: Place) -> None:
        self._tls = site_tls(config)
        names = [region.name for region in config.run.regions]
        own_routes = routes(config.index, config.run.num_regions)
        self._config = config
        self._place = place
        self._started_at = time.monotonic()
        self._lag = LoopLag()
        self._board = Board(names, config.site.name)
        self._exchange = Exchange(self._board, names, own_routes)
        served = Served(
            region=config.site.name,
            run_hash=config.run.hash,
            version=version("geotrain"),
            routes=own_routes,
            silent_s=config.site.liveness.silent_s,
        )
        self._attachments = Attachments(served, self._exchange)
        self._egress_file = EgressFile(config.socket_path)
        self._egress = EgressMeter(
            {name: peer.egress_usd_per_gb for name, peer in config.neighbours.items()},
            config.site.limits.egress_usd_per_day,
            earlier=self._egress_file.read(),
        )
        self._links = self._make_links()
        self._link_server = LinkServer(congestion=config.site.link.congestion, tls=self._tls)
        self._watch = Watch(
            exchange=self._exchange,
            attachments=self._attachments,
            links=self._links,
            egress=self._egress,
            liveness=config.site.liveness,
            now=time.monotonic(),
        )
        self._status = StatusPage(self.snapshot, self._attachments.stacks)

    async def run(self) -> None:
        """Serve until a signal comes; then tell peers and ranks why, and release everything."""
        loop = asyncio.get_running_loop()
        stopping: asyncio.Future[str] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, stopping, number.name)
        workers = make_workers()
        loop.set_default_executor(workers)
        raise_limit()
        loop.set_exception_handler(Shortage())
        try:
            await self._listen(loop)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(link.run()) for link in self._links.values()]
                tasks += [group.create_task(self._tick()), group.create_task(self._measure_lag())]
                reason = await stopping
                await self._say_goodbye(reason)
                for task in tasks:
                    task.cancel()
        finally:
            await self._status.close()
            await self._link_server.close()

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        site = self._config.site
        in_force = probe(site.link.congestion)
        if in_force.refused:
            logger.warning("! site.link: %s; links run %s", in_force.refused, in_force.name)
        try:
            await self._link_server.start(*split_address(site.listen), self._links.get)
        except OSError as exc:
            raise GeotrainError(
                f"cannot listen for peers on {site.listen}: {os_reason(exc)}; "
                "stop what uses the port, or change site.listen"
            ) from exc
        await self._status.start(*split_address(site.status))
        self._attachments.listen(loop, self._place.listener)
        addresses = {
            "listen": _address(site.listen, self._link_server.port),
            "status": _address(site.status, self._status.port),
        }
        self._place.publish({**addresses, "pid": os.getpid()})
        logger.info(
            "= region %s (%d of %d) listens on %s, status on http://%s/status",
            site.name,
            self._config.index + 1,
            self._config.run.num_regions,
            addresses["listen"],
            addresses["status"],
        )
        self._tell_encryption()

    def _tell_encryption(self) -> None:
        if not self._config.neighbours:
            return
        if self._tls is None:
            logger.info("= links are not encrypted: no [site.tls] here")
            return
        logger.info("= links are encrypted: TLS 1.3, own certificate until %s", self._tls.ends)
        for text in warnings(self._tls).texts:
            logger.warning("! site.tls: %s", text)

    async def _say_goodbye(self, reason: str) -> None:
        name = self._config.site.name
        # `geotrain run` ends its daemon so once the command has ended.
        ends = {"left": "its training process is done", "failed": "its training process failed"}
        why = ends.get(self._board.own.state, f"ended by {reason}")
        self._exchange.fail(
            "daemon",
            f"the daemon of region {name} was ended ({reason}); "
            "start it again, then the training process",
        )
        text = f"its daemon ends: {why}"
        closing = [asyncio.ensure_future(link.close(text)) for link in self._links.values()]
        if closing:
            await asyncio.wait(closing, timeout=GOODBYE_TIMEOUT_S)
        self._attachments.close()
        logger.info("= the daemon ends: %s", why)

    async def _tick(self) -> None:
        while True:
            self._watch.tick(now=time.monotonic(), day=datetime.now(UTC).date().isoformat())
            if self._egress.spent.bytes:
                self._egress_file.write(self._egress.spent)
            await asyncio.sleep(TICK_S)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.on_tick(loop.time() - due)

    def _make_links(self) -> dict[str, Link]:
        site = self._config.site
        settings = LinkSettings(
            ping_interval_s=site.link.ping_interval_s,
            silent_s=site.liveness.silent_s,
            num_lanes=None if site.link.lanes == "auto" else site.link.lanes,
            congestion=site.link.congestion,
        )
        coder = make_coder()
        boot = time.time_ns()
        links = {}
        for peer, peer_config in self._config.neighbours.items():
            links[peer] = Link(
                hello=Hello(
                    version=version("geotrain"),
                    run_id=self._config.run.id,
                    region=site.name,
                    index=self._config.index,
                    to=peer,
                    boot=boot,
                    run=self._config.run.canonical(),
                ),
                peer=peer,
                url=peer_config.url,
                tls=self._tls if peer_config.url is not None else None,
                coder=coder,
                settings=settings,
                board=lambda: list(self._board.entries),
                on_board=self._exchange.on_link_board,
                on_delivered=self._exchange.on_link_delivered,
                on_acked=self._exchange.on_link_acked,
                on_state=lambda: self._watch.tell_links(),
                on_failed=partial(self._on_link_failed, peer),
            )
            self._exchange.add_link(peer, links[peer])
        return links

    def _on_link_failed(self, peer: str, view: int, reason: str) -> None:
        if self._exchange.view is not None and self._exchange.view.id == view:
            self._exchange.fail("link", f"the link to region {peer} failed: {reason}")

    def snapshot(self) -> dict[str, Any]:
        """The status document."""
        now = time.monotonic()
        view = self._exchange.view
        return {
            "run_id": self._config.run.id,
            "region": self._config.site.name,
            "index": self._config.index,
            "pid": os.getpid(),
            "uptime_s": round(now - self._started_at, 3),
            "state": self._board.own.state,
            "view": f"{view.id:016x}" if view is not None else None,
            "board": [_plain(entry.to_map()) for entry in self._board.entries],
            "ranks": [
                {
                    "rank": number,
                    "pid": rank.server.pid,
                    "state": rank.state,
                    "action": rank.liveness.action,
                    "action_age_s": round(rank.liveness.action_age_s(now), 3),
                    "step": _plain(rank.report.get("step")),
                    "report": _plain(rank.report),
                }
                for number, rank in sorted(self._attachments.ranks.items())
            ],
            "links": {peer: link.stats() for peer, link in self._links.items()},
            "security": "plaintext" if self._tls is None else "tls",
            "egress": self._egress.summary(),
            "steps": self._exchange.reports.summary(),
            "loop_lag_ms": self._lag.quantiles_ms(),
            "memory_rss_bytes": _resident_bytes(),
        }


def _stop(stopping: asyncio.Future[str], reason: str) -> None:
    if not stopping.done():
        stopping.set_result(reason)


def _address(configured: str, port: int) -> str:
    return f"{configured.rpartition(':')[0]}:{port}"


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _plain(value: object) -> Any:
    """What a rank or peer said, as JSON can carry it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
