"""Real daemons as processes, and torch-free ranks that attach to them, for tests and benchmarks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from geotrain.config import load_config
from geotrain.daemon.routing import routes
from geotrain.lab.certificates import make_certificates
from geotrain.transport.attachment import Attachment
from tests.free_ports import free_ports

START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0


class Daemons:
    """A line of regions named a, b, c ..., a daemon process each."""

    def __init__(
        self,
        folder: Path,
        num_regions: int,
        *,
        site: str = "",
        run: str = "",
        batch: int = 8,
        tls: bool = False,
    ) -> None:
        """
        Args:
            site, run: More TOML for every region's [site], and for [run].
            batch: run.global_batch.
            tls: Encrypt the links, with certificates made here.
        """
        self._tls = tls
        self._batch = batch
        self.names = [chr(ord("a") + index) for index in range(num_regions)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = folder
        self._ports = free_ports(num_regions)
        regions = "".join(
            f'[[run.regions]]\nname = "{name}"\nlayers = "{index}:{index + 1}"\n'
            for index, name in enumerate(self.names)
        )
        if tls:
            make_certificates(folder, self.names)
        for name in self.names:
            self.write_config(name, regions=regions, site=site, run=run)

    def write_config(self, name: str, *, regions: str, site: str, run: str) -> None:
        index = self.names.index(name)
        peers = "".join(
            f'[site.peers.{peer}]\nurl = "{self.scheme}://127.0.0.1:{port}"\n'
            for peer, port in zip(self.names, self._ports, strict=True)
            if abs(self.names.index(peer) - index) == 1
        )
        self.config_path(name).write_text(
            f"version = 1\n[run]\nid = 'test'\nglobal_batch = {self._batch}\n{run}\n{regions}"
            f"[site]\nname = '{name}'\nlisten = '127.0.0.1:{self._ports[index]}'\n"
            f"status = '127.0.0.1:0'\nsocket = '{self.socket_path(name)}'\n{site}\n{peers}"
            + (tls_table(name) if self._tls else "")
        )

    @property
    def scheme(self) -> str:
        return "https" if self._tls else "http"

    def config_path(self, name: str) -> Path:
        return self._folder / f"{name}.toml"

    def log_path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def socket_path(self, name: str) -> Path:
        return self._folder / f"{name}.sock"

    def start(self, name: str, *, env: Mapping[str, str] | None = None) -> None:
        """Start a daemon and wait until it serves its status page."""
        # -P: the current folder holds the metadata of an editable install, which would come before
        # any that a test puts on the path.
        self._note_path(name).unlink(missing_ok=True)  # that of one which was killed
        module = [sys.executable, "-P", "-m", "geotrain"]
        argv = [*module, "daemon", "--config", str(self.config_path(name))]
        with self.log_path(name).open("ab") as log:
            process = subprocess.Popen(
                argv,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
            )
        self.processes[name] = process
        deadline = time.monotonic() + START_LIMIT_S
        while not self._note_path(name).exists():
            assert process.poll() is None, self.log(name)
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.01)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        """End a daemon and return its exit status."""
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(STOP_LIMIT_S)

    def log(self, name: str) -> str:
        return self.log_path(name).read_text()

    def status(self, name: str, query: str = "") -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.get(name, f"/status{query}"))
        return document

    def get(self, name: str, path: str) -> str:
        address = json.loads(self._note_path(name).read_text())["status"]
        with urllib.request.urlopen(f"http://{address}{path}", timeout=STOP_LIMIT_S) as response:
            text: str = response.read().decode()
            return text

    def wait_for(self, name: str, what: Any, *, limit_s: float = START_LIMIT_S) -> dict[str, Any]:
        """The status document of a daemon once `what(document)` is true."""
        deadline = time.monotonic() + limit_s
        while not what(status := self.status(name)):
            assert time.monotonic() < deadline, (status, self.log(name))
            time.sleep(0.02)
        return status

    def attach(self, name: str, **changes: Any) -> Attachment:
        return attach(self.config_path(name), **changes)

    def _note_path(self, name: str) -> Path:
        return self._folder / f"{name}.sock.json"

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(STOP_LIMIT_S)


def tls_table(name: str) -> str:
    """Of a site whose files `make_certificates` has written beside its config."""
    return (
        f"[site.tls]\ncertificate = '{name}.pem'\nkey = '{name}.key'\nauthority = 'authority.pem'\n"
    )


@contextlib.contextmanager
def daemons(folder: Path, num_regions: int, **extra: Any) -> Iterator[Daemons]:
    started = Daemons(folder, num_regions, **extra)
    try:
        for name in started.names:
            started.start(name)
        yield started
    finally:
        started.close()


def attach(config_path: Path, **changes: Any) -> Attachment:
    """Attach as the rank of the region whose config this is."""
    config = load_config(config_path)
    own = routes(config.index, config.run.num_regions)
    arguments: dict[str, Any] = {
        "run_hash": config.run.hash,
        "version": version("geotrain"),
        "region": config.site.name,
        "rank": 0,
        "world_size": 1,
        "arena_bytes": config.site.arena_mib << 20,
        "streams_in": [route.receives for route in own],
        "streams_out": [route.sends for route in own],
        "timeout_s": START_LIMIT_S,
    }
    return Attachment.connect(config.socket_path, **{**arguments, **changes})


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
