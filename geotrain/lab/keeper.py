"""The process that keeps a lab: it holds the namespaces or the relays, and obeys requests.

It ends when its owner does (a pidfd tells, however that happened), when it is told to, or when a
forwarder has ended. What it leaves behind then is nothing: forwarders watch it the same way,
namespaces go with the last descriptor, and what still runs in them is ended first. A lab with a
name is reached through an abstract socket, which is no file.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from geotrain.errors import ConfigError, GeotrainError
from geotrain.lab.conversation import socket_name
from geotrain.lab.emulator.relayed import HOST, RelayedSites
from geotrain.lab.emulator.sites import LabFailedError, NamespaceSites, address_of
from geotrain.lab.history import History
from geotrain.lab.script import parse_script
from geotrain.lab.settings import Direction, LinkSettings, Selection

_LINE_LIMIT_BYTES = 4 << 20
_REMOVE_TRIES, _REMOVE_PAUSE_S = 50, 0.1
Reply = dict[str, Any]


class Keeper:
    """Answers requests; each is a JSON object a line, and so is its answer."""

    def __init__(
        self, spec: Mapping[str, Any], links: dict[Direction, LinkSettings], owner_fd: int
    ) -> None:
        self._spec = spec
        self._links = links
        self._owner_fd = owner_fd
        self._sites: NamespaceSites | RelayedSites
        self._history = History()
        self._script: asyncio.Task[None] | None = None
        self._folders: list[str] = []
        self._over: asyncio.Future[str]
        self._handlers: dict[str, Callable[[Reply], Awaitable[Reply]]] = {
            "status": self._status,
            "set": self._set,
            "script": self._run_script,
            "route": self._route,
            "aim": self._aim,
            "close_route": self._close_route,
            "detach": self._detach,
            "remove": self._remove_at_end,
            "close": self._close,
        }

    def build(self) -> None:
        """The sites; before the event loop, since making namespaces forks."""
        spec = self._spec
        if spec["kind"] == "netns":
            self._sites = NamespaceSites(
                spec["sites"],
                spec["topology"],
                self._links,
                congestion=spec["congestion"],
                tcp_buffer_bytes=spec["tcp_buffer_bytes"],
                seed=spec["seed"],
            )

    async def serve(self, control: socket.socket, listener: socket.socket | None) -> None:
        spec, loop = self._spec, asyncio.get_running_loop()
        self._over = loop.create_future()
        if spec["kind"] == "relay":
            self._sites = RelayedSites(
                spec["sites"], spec["topology"], self._links, seed=spec["seed"]
            )
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._end, f"the lab got {number.name}")
        if sys.platform == "linux":
            loop.add_reader(self._owner_fd, self._end, "its owner has ended")
        if isinstance(self._sites, NamespaceSites):
            for forwarder in self._sites.forwarders:
                way = " to ".join(forwarder.direction)
                loop.add_reader(forwarder.pidfd, self._end, f"the forwarder {way} has ended")
        reader, writer = await asyncio.open_connection(sock=control, limit=_LINE_LIMIT_BYTES)
        owner = asyncio.create_task(self._converse(reader, writer, owner=True))
        server = None
        if listener is not None:
            server = await asyncio.start_unix_server(
                self._visit, sock=listener, limit=_LINE_LIMIT_BYTES
            )
        _say(writer, await self._status({}))
        reason = await self._over
        await self._tidy_up()
        with contextlib.suppress(OSError):
            _say(writer, {"error": f"the lab has ended: {reason}"})
            writer.close()
        owner.cancel()
        if server is not None:
            server.close()

    async def _tidy_up(self) -> None:
        if self._script is not None:
            self._script.cancel()
        if isinstance(self._sites, NamespaceSites):
            self._sites.close()
        else:
            await self._sites.close()
        for folder in self._folders:
            await _remove(folder)

    def _end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket")
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid in (0, os.getuid()):  # an abstract socket has no permissions of its own
            await self._converse(reader, writer, owner=False)
        writer.close()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, owner: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while text := await reader.readline():
                request = json.loads(text)
                try:
                    reply = await self._handlers[request["op"]](request)
                except (GeotrainError, OSError) as error:
                    reply = {"error": str(error), "config": isinstance(error, ConfigError)}
                _say(writer, reply)
                await writer.drain()
        if owner and self._owner_fd >= 0:
            self._end("its owner let go of it")

    async def _status(self, request: Reply) -> Reply:
        if self._over.done():
            raise LabFailedError(f"the lab is ending: {self._over.result()}")
        spec, sites = self._spec, self._sites
        links, places = [], {}
        for index, name in enumerate(spec["sites"]):
            places[name] = {"address": HOST, "namespace": None}
            if isinstance(sites, NamespaceSites):
                descriptor = sites.namespaces[index]
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
                places[name] = {"address": address_of(index), "namespace": path}
        for number, (way, settings) in enumerate(self._links.items()):
            if isinstance(sites, NamespaceSites):
                counters = sites.forwarders[number].counters()
            else:
                counters = sites.counters(way)
            links.append({"source": way[0], "target": way[1], "settings": settings.as_dict()})
            links[-1]["counters"] = counters
        congestion = sites.congestion if isinstance(sites, NamespaceSites) else None
        head = {key: spec[key] for key in ("name", "kind", "reason", "topology")}
        return {
            **head,
            "pid": os.getpid(),
            "congestion": congestion,
            "sites": places,
            "links": links,
            "events": self._history.events(),
        }

    async def _set(self, request: Reply) -> Reply:
        selection = Selection(**request["selection"])
        self._apply(selection, request["settings"], why=request.get("why", ""))
        return {"ok": True}

    def _apply(self, selection: Selection, settings: Mapping[str, Any], *, why: str) -> None:
        ways = selection.pick(list(self._links))
        wanted = {way: self._links[way].changed(settings) for way in ways}
        for way, new in wanted.items():
            if isinstance(self._sites, NamespaceSites):
                self._sites.forwarders[list(self._links).index(way)].change(new)
            else:
                self._sites.change(way, new)
            self._links[way] = new
        now = asyncio.get_running_loop().time()
        self._history.add(str(selection), settings, why=why, now=now)

    async def _run_script(self, request: Reply) -> Reply:
        changes = parse_script(request["text"], file=request["file"], directions=list(self._links))
        if self._script is not None:
            self._script.cancel()
        self._script = asyncio.create_task(self._follow(changes))
        return {"num_changes": len(changes), "last_at_s": changes[-1].at_s}

    async def _follow(self, changes: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        for change in changes:
            await asyncio.sleep(started_at + change.at_s - loop.time())
            try:
                self._apply(change.selection, change.settings, why=change.why or "script")
            except LabFailedError as error:
                self._end(str(error))

    async def _route(self, request: Reply) -> Reply:
        source, target, port = request["source"], request["target"], request["port"]
        for site in (source, target):
            if site not in self._spec["sites"]:
                raise ConfigError(f"there is no site {site}; there are {self._spec['sites']}")
        if isinstance(self._sites, NamespaceSites):
            host = address_of(self._spec["sites"].index(target))
            return {"host": host, "port": port, "number": 0}
        host, own_port, number = await self._sites.open_route(source, target, port)
        return {"host": host, "port": own_port, "number": number}

    async def _aim(self, request: Reply) -> Reply:
        if isinstance(self._sites, RelayedSites):
            self._sites.aim(request["number"], request["port"])
        return {"ok": True}

    async def _close_route(self, request: Reply) -> Reply:
        if isinstance(self._sites, RelayedSites):
            await self._sites.close_route(request["number"])
        return {"ok": True}

    async def _detach(self, request: Reply) -> Reply:
        """From now on only `close` ends the lab."""
        asyncio.get_running_loop().remove_reader(self._owner_fd)
        self._owner_fd = -1
        return {"ok": True}

    async def _remove_at_end(self, request: Reply) -> Reply:
        self._folders.append(request["folder"])
        return {"ok": True}

    async def _close(self, request: Reply) -> Reply:
        self._end("it was closed")
        return {"ok": True, "pid": os.getpid()}


async def _remove(folder: str) -> None:
    """Remove it, also where those who write into it are just about to end."""
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        await asyncio.sleep(_REMOVE_PAUSE_S)


def _say(writer: asyncio.StreamWriter, reply: Reply) -> None:
    writer.write(json.dumps(reply).encode() + b"\n")


def main(control_fd: int, owner_fd: int) -> int:
    """Keep the lab that the first line from the owner describes."""
    control = socket.socket(fileno=control_fd)
    text = control.makefile("rb").readline(_LINE_LIMIT_BYTES)
    if not text:
        return 1  # the owner ended at once
    spec = json.loads(text)
    links = {(source, target): LinkSettings(**given) for source, target, given in spec["links"]}
    keeper = Keeper(spec, links, owner_fd)
    try:
        listener = _listen(spec["name"]) if spec["name"] else None
        keeper.build()
    except (GeotrainError, OSError) as error:
        answer = {"error": str(error), "config": isinstance(error, ConfigError)}
        control.sendall(json.dumps(answer).encode() + b"\n")
        return 1
    control.setblocking(False)
    asyncio.run(keeper.serve(control, listener))
    return 0


def _listen(name: str) -> socket.socket:
    if sys.platform != "linux":
        raise ConfigError(f"a lab with a name needs Linux (this is {sys.platform})")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_name(name))
    except OSError as error:
        raise ConfigError(f"there is a lab called {name} already ({error.strerror})") from error
    listener.listen()
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
