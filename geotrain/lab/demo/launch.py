"""Starts the parts of a demo: for each region a daemon and a training process."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from geotrain.errors import GeotrainError
from geotrain.lab.demo.options import SEED, Options, ports_path, site_toml
from geotrain.lab.processes import Child, own_module, start_child
from geotrain.lab.wan import Route, Wan

START_LIMIT_S = 30.0
_POLL_S = 0.02
LISTEN_PORT = 7400
"""Of every daemon in a namespace of its own; on the loopback that all share, any free port."""
_PLAIN_SCRIPT = Path(__file__).with_name("plain.py")


class DemoFailedError(GeotrainError):
    """A part of the demo ended or hung; says which, with its last words."""


class Launcher:
    """Writes the config files and starts children; whoever calls it stops them."""

    def __init__(
        self, options: Options, *, folder: Path, wan: Wan, routes: Sequence[Route]
    ) -> None:
        """`routes`: from each region to the next."""
        self._options = options
        self._folder = folder
        self._wan = wan
        self._routes = routes

    def write_configs(self) -> None:
        for index, name in enumerate(self._options.names):
            text = site_toml(
                self._options,
                index,
                folder=self._folder,
                listen=self._listen_address(name),
                dial=self._dial_address(index),
            )
            self._config(name).write_text(text, encoding="utf-8")

    async def start_daemon(self, name: str) -> Child:
        return await self._start_child(
            own_module("geotrain", ["daemon", "--config", str(self._config(name))]),
            site=name,
            name=f"daemon of {name}",
        )

    async def start_trainer(self, name: str) -> Child:
        options = self._options
        command = own_module("geotrain.lab.demo.train", [])
        command += ["--steps", str(options.steps), "--seed", str(SEED)]
        command += ["--batch", str(options.batch), "--layers", str(options.num_layers)]
        command += ["--json", *(["--save", str(self._saved(name))] if options.verify else [])]
        return await self._start_child(
            command,
            site=name,
            name=f"training process of {name}",
            environment={"GEOTRAIN_CONFIG": str(self._config(name))},
            pipe_stdout=True,
        )

    async def start_plain(self, *, steps: int) -> Child:
        """One plain torch process; it prints one JSON object when it is done, and ends."""
        options = self._options
        command = [sys.executable, "-P", str(_PLAIN_SCRIPT), "--times", "--steps", str(steps)]
        command += ["--seed", str(SEED), "--batch", str(options.batch)]
        command += ["--microbatches", str(options.microbatches)]
        command += ["--layers", str(options.num_layers)]
        if options.verify:
            command += ["--compare", *(str(self._saved(name)) for name in options.names)]
        return await self._start_child(command, name="plain torch process", pipe_stdout=True)

    async def ports_of(self, daemon: Child, name: str) -> Mapping[str, Any]:
        """The ports that a daemon got, from the file it writes once it listens."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if daemon.process.returncode is not None:
                raise DemoFailedError(daemon.describe_end())
            try:
                ports: dict[str, Any] = json.loads(ports_path(self._folder, name).read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                await asyncio.sleep(_POLL_S)
                continue
            return ports
        raise DemoFailedError(f"{daemon.name} did not listen within {START_LIMIT_S:g} s")

    def _listen_address(self, name: str) -> str:
        if self._wan.kind == "relay":
            return "127.0.0.1:0"
        return f"{self._wan.listen_host(name)}:{LISTEN_PORT}"

    def _dial_address(self, index: int) -> str | None:
        if index >= len(self._routes):
            return None
        return f"{self._routes[index].host}:{self._routes[index].port}"

    def _config(self, name: str) -> Path:
        return self._folder / f"{name}.toml"

    def _saved(self, name: str) -> Path:
        return self._folder / f"{name}.pt"

    async def _start_child(
        self,
        command: Sequence[str],
        *,
        name: str,
        site: str | None = None,
        environment: Mapping[str, str] | None = None,
        pipe_stdout: bool = False,
    ) -> Child:
        own = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        own["TMPDIR"] = str(self._folder)  # so that the caches of libraries go with it
        if site is not None:
            command = self._wan.command(site, command)
        return await start_child(
            command,
            name=name,
            log=self._folder / f"{name.replace(' ', '-')}.log",
            environment={**os.environ, **own, **(environment or {})},
            pipe_stdout=pipe_stdout,
        )
