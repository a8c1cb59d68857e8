"""Two real daemons and two torch-free ranks, joined by an emulated link that faults happen to.

The link is a relay on a thread of its own, or network namespaces, where TCP is the kernel's from
end to end.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from geotrain.lab.certificates import make_certificates
from geotrain.lab.emulator.relay import Relay
from geotrain.lab.processes import tethered
from geotrain.lab.settings import LinkSettings
from geotrain.lab.wan import open_wan
from tests.daemon.daemons import attach, tls_table

NAMES = ("a", "b")
BASE = LinkSettings.from_round_trip(0.01, rate_bytes_per_s=20e6)
START_LIMIT_S = 60.0
ARENA_MIB = 8
NUM_LANES = 3
"""Of each link, for bulk; a fixed number, so that every fault meets several."""
_PORT = 7400


class Net(Protocol):
    """The link, and where the daemons live; `forward` is the direction from a to b."""

    host: str
    """Where b listens."""
    port: int
    kind: str

    def url(self, port: int) -> str:
        """Where a dials b, which listens at this port."""

    def command(self, name: str, command: list[str]) -> list[str]: ...
    def connect(self, port: int) -> socket.socket:
        """A stranger's connection to b, as from a."""

    def set(self, *, forward: bool | None = None, **changes: Any) -> None:
        """Change settings of one direction, or of both."""

    def close(self) -> None: ...


class RelayNet:
    host, port, kind = "127.0.0.1", 0, "relay"

    def __init__(self, seed: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._thread.start()
        self._ways = {True: BASE, False: BASE}
        self._relay = Relay(BASE, seed=seed)
        self._relay_port = self._run(self._relay.start())
        self._target = 0

    @property
    def address(self) -> str:
        """What is dialled instead of b; connections wait until `aim`."""
        return f"http://{self.host}:{self._relay_port}"

    def aim(self, port: int) -> None:
        """Tell once where b listens."""
        self._call(self._relay.aim, self.host, port)

    def url(self, port: int) -> str:
        if not self._target:
            self._target = port
            self.aim(port)
        return self.address

    def command(self, name: str, command: list[str]) -> list[str]:
        return command

    def connect(self, port: int) -> socket.socket:
        return socket.create_connection((self.host, port), START_LIMIT_S)

    def set(self, *, forward: bool | None = None, **changes: Any) -> None:
        for way in (True, False) if forward is None else (forward,):
            self._ways[way] = self._ways[way].changed(changes)
        self._call(self._relay.change, self._ways[True], self._ways[False])

    def reset(self, *, all_lanes: bool) -> None:
        if all_lanes:
            self._call(self._relay.cut)
            self._call(self._relay.mend)
        else:
            self._call(self._relay.reset_one)

    def close(self) -> None:
        self._run(self._relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_LIMIT_S)
        self._loop.close()

    def _call(self, act: Callable[..., Any], *args: Any) -> None:
        async def call() -> None:
            act(*args)

        self._run(call())

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_LIMIT_S)


class NamespaceNet:
    port, kind = _PORT, "netns"

    def __init__(self, seed: int) -> None:
        self._wan = open_wan("netns", sites=NAMES, link=BASE, seed=seed)
        self.host = self._wan.listen_host("b")

    def url(self, port: int) -> str:
        route = self._wan.route("a", "b", port)
        return f"http://{route.host}:{route.port}"

    def command(self, name: str, command: list[str]) -> list[str]:
        return self._wan.command(name, command)

    def connect(self, port: int) -> socket.socket:
        sock = self._wan.socket("a")
        sock.settimeout(START_LIMIT_S)
        sock.connect((self.host, port))
        return sock

    def set(self, *, forward: bool | None = None, **changes: Any) -> None:
        for way in (True, False) if forward is None else (forward,):
            source, target = NAMES if way else NAMES[::-1]
            self._wan.set(source=source, target=target, **changes)

    def close(self) -> None:
        self._wan.close()


class Line:
    """The daemons; a context manager. What it started, it ends."""

    def __init__(self, folder: Path, net: Net, *, silent_s: float, tls: bool = False) -> None:
        self.net = net
        self.tls = tls
        if tls:
            make_certificates(folder, NAMES)
        self.silent_s = silent_s
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, dict[str, Any]] = {}
        self._folder = folder

    def __enter__(self) -> "Line":
        self._write("b", listen=f"{self.net.host}:{self.net.port}", peer="a", url=None)
        self.start("b")
        url = self.net.url(self.listen_port("b"))
        url = url.replace("http:", "https:") if self.tls else url
        self._write("a", listen="127.0.0.1:0", peer="b", url=url)
        self.start("a")
        return self

    def __exit__(self, *exc: object) -> None:
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        self.net.close()

    def listen_port(self, name: str) -> int:
        return int(self.ports[name]["listen"].rpartition(":")[2])

    def start(self, name: str) -> None:
        """A daemon, and wait until it listens."""
        note = self._folder / f"{name}.sock.json"
        note.unlink(missing_ok=True)
        daemon = [sys.executable, "-m", "geotrain", "daemon", "--config", str(self.config(name))]
        command = tethered(self.net.command(name, daemon), parent_pid=os.getpid())
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.daemons[name] = process
        deadline = time.monotonic() + START_LIMIT_S
        while not note.exists():
            assert process.poll() is None and time.monotonic() < deadline, self.logs()
            time.sleep(0.01)
        self.ports[name] = json.loads(note.read_text())

    def attach(self, name: str) -> Any:
        return attach(self.config(name))

    def config(self, name: str) -> Path:
        return self._folder / f"{name}.toml"

    def pid(self, name: str) -> int:
        """Of the daemon itself, not of what put it into its namespace."""
        return int(self.ports[name]["pid"])

    def logs(self) -> str:
        files = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def _write(self, name: str, *, listen: str, peer: str, url: str | None) -> None:
        dial = f'url = "{url}"' if url else ""
        self.config(name).write_text(
            f"version = 1\n[run]\nid = 'faults'\nglobal_batch = 8\n"
            f"[[run.regions]]\nname = 'a'\nlayers = '0:1'\n"
            f"[[run.regions]]\nname = 'b'\nlayers = '1:2'\n"
            f"[site]\nname = '{name}'\nlisten = '{listen}'\nstatus = '127.0.0.1:0'\n"
            f"socket = '{self._folder / name}.sock'\narena_mib = {ARENA_MIB}\n"
            f"[site.link]\nping_interval_s = {min(1.0, self.silent_s / 5)}\n"
            + ("" if self.tls else "security = 'plaintext'\n")
            + f"lanes = {NUM_LANES}\n"
            f"[site.liveness]\nsilent_s = {self.silent_s}\nwait_s = 300.0\n"
            f"[site.peers.{peer}]\n{dial}\n" + (tls_table(name) if self.tls else "")
        )
