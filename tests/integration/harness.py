"""Real daemons and real training processes over loopback, for the tests in this folder.

`Regions` writes a config file for each region, starts a daemon and a script for each, waits with a
deadline and leaves nothing behind. Every child is tied to the test process: it dies with it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geotrain.lab.demo.options import layer_ranges
from geotrain.lab.processes import tethered
from tests.free_ports import free_ports

START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0
TAIL_LINES = 30
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The `[run]` table of a test."""

    regions: int = 2
    layers: int = 4
    microbatches: Any = 3
    global_batch: int = 24
    precision: str = "fp32"
    codec: str = "none"
    window: Any = "classic"
    seed: int = 11
    silent_s: float = 10.0
    wait_s: float = 30.0
    arena_mib: int = 8
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More keys of `[run]`, such as max_grad_norm."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """More keys of `[run.plan]`."""
    keeps_ports: bool = False
    """Whether daemons listen at ports that nobody else is given: those that are to be killed."""
    egress_usd_per_gb: float = 0.0
    egress_usd_per_day: float | None = None

    @property
    def names(self) -> list[str]:
        return [f"r{index}" for index in range(self.regions)]


@dataclass(eq=False)
class Process:
    """A child with its output in a file."""

    name: str
    popen: subprocess.Popen
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self) -> list[str]:
        """The lines that are whole: while it runs, the last one may be half written."""
        parts = self.output().splitlines(keepends=True)
        return [part.rstrip("\n") for part in parts if part.endswith("\n")]

    def tail(self) -> str:
        return "\n".join(self.output().splitlines()[-TAIL_LINES:])

    def wait(self, *, deadline: float) -> int:
        """Its exit status. AssertionError with its output when it takes too long."""
        try:
            return self.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end in time:\n{self.tail()}") from None

    def stop(self, *, limit_s: float = STOP_LIMIT_S) -> int:
        """SIGTERM, SIGKILL at the deadline; returns the exit status."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        return self.popen.wait(limit_s)


def _inherited() -> dict[str, str]:
    # Unbuffered, a printed line and its end are two writes, with a thread's log line between them.
    return {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}


def start_process(
    command: Sequence[str], *, name: str, log: Path, env: Mapping[str, str] | None = None
) -> Process:
    with log.open("wb") as output:
        popen = subprocess.Popen(
            tethered(command, parent_pid=os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_inherited(), **ONE_THREAD, **(env or {})},
        )
    return Process(name, popen, log)


class Regions:
    """N regions on this machine; a context manager."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.daemons: dict[str, Process] = {}
        self.ranks: dict[str, Process] = {}
        self.ports: dict[str, dict[str, Any]] = {}
        self.num_killed: dict[str, int] = {}
        ports = free_ports(spec.regions) if spec.keeps_ports else [0] * spec.regions
        self._ports = dict(zip(spec.names, ports, strict=True))

    def __enter__(self) -> "Regions":
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self.spec.names:
            self.rank_config(name).write_text(self._toml(name, peers={}))
        return self

    def __exit__(self, *exc: object) -> None:
        for process in [*self.ranks.values(), *self.daemons.values()]:
            if process.name.startswith("rank"):
                process.popen.kill()
            process.stop()

    # ---- files

    def rank_config(self, name: str) -> Path:
        """A config for the region's scripts: same run, no peers, there before the daemon is."""
        return self.folder / f"{name}.rank.toml"

    def config(self, name: str) -> Path:
        return self.folder / f"{name}.toml"

    def socket(self, name: str) -> Path:
        return self.folder / f"{name}.sock"

    def _toml(self, name: str, *, peers: Mapping[str, str | None]) -> str:
        spec = self.spec
        lines = ["version = 1", "[run]", 'id = "test"', f"seed = {spec.seed}"]
        lines += [f"global_batch = {spec.global_batch}", f'precision = "{spec.precision}"']
        lines += [f"{key} = {json.dumps(value)}" for key, value in spec.extra.items()]
        lines += ["[run.plan]", f"microbatches = {json.dumps(spec.microbatches)}"]
        lines += [f"window = {json.dumps(spec.window)}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in spec.plan.items()]
        lines += ["[run.compression]"]
        lines += [f'activations = "{spec.codec}"', f'gradients = "{spec.codec}"']
        for region, (first, last) in zip(
            spec.names, layer_ranges(spec.layers, spec.regions), strict=True
        ):
            lines += ["[[run.regions]]", f'name = "{region}"', f'layers = "{first}:{last}"']
        lines += ["[site]", f'name = "{name}"', f'listen = "127.0.0.1:{self._ports[name]}"']
        lines += ['status = "127.0.0.1:0"', f"arena_mib = {spec.arena_mib}"]
        lines += [f"socket = {json.dumps(str(self.socket(name)))}"]
        lines += ["[site.liveness]", f"silent_s = {spec.silent_s}", f"wait_s = {spec.wait_s}"]
        if spec.egress_usd_per_day is not None:
            lines += ["[site.limits]", f"egress_usd_per_day = {spec.egress_usd_per_day}"]
        for peer, url in peers.items():
            lines += [f"[site.peers.{peer}]", *([f'url = "{url}"'] if url else [])]
            lines += [f"egress_usd_per_gb = {spec.egress_usd_per_gb}"]
        return "\n".join(lines) + "\n"

    # ---- processes

    def start_daemons(self, *, urls: Mapping[str, str] | None = None) -> None:
        """All daemons, the last region's first, so that each knows where the next one listens.

        Args:
            urls: Where a region is to be dialled instead, such as through a relay.
        """
        names = self.spec.names
        for index in reversed(range(len(names))):
            peers: dict[str, str | None] = {}
            if index > 0:
                peers[names[index - 1]] = None
            if index < len(names) - 1:
                following = names[index + 1]
                address = self.ports[following]["listen"]
                peers[following] = (urls or {}).get(following, f"http://{address}")
            self.config(names[index]).write_text(self._toml(names[index], peers=peers))
            self.start_daemon(names[index])

    def start_daemon(self, name: str) -> Process:
        """One daemon, and wait until it listens; its config must have been written."""
        ports_file = self.folder / f"{name}.sock.json"
        ports_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "geotrain", "daemon", "--config", str(self.config(name))]
        log = self.folder / f"{name}.daemon.log"
        daemon = start_process(command, name=f"daemon of {name}", log=log)
        self.daemons[name] = daemon
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert daemon.popen.poll() is None, f"{daemon.name} ended:\n{daemon.tail()}"
            try:
                self.ports[name] = json.loads(ports_file.read_text())
                return daemon
            except (FileNotFoundError, json.JSONDecodeError):
                time.sleep(0.01)
        raise AssertionError(f"{daemon.name} does not listen:\n{daemon.tail()}")

    def kill_daemon(self, name: str) -> None:
        """SIGKILL; the next `start_daemon` listens where this one did."""
        assert self.spec.keeps_ports
        self.daemons[name].popen.kill()
        self.daemons[name].stop()
        self.num_killed[name] = self.num_killed.get(name, 0) + 1

    def start_rank(
        self, name: str, script: Path, *args: str, env: Mapping[str, str] | None = None
    ) -> Process:
        log = self.folder / f"{name}.rank.log"
        rank = start_process(
            [sys.executable, str(script), *args],
            name=f"rank of {name}",
            log=log,
            env={"GEOTRAIN_CONFIG": str(self.rank_config(name)), **(env or {})},
        )
        self.ranks[name] = rank
        return rank

    def run(self, script: Path, *args: str, limit_s: float) -> None:
        """The script in every region, with daemons where there are several, until all succeed.

        Each gets its region's name as its first argument.
        """
        deadline = time.monotonic() + limit_s
        for name in self.spec.names:
            self.start_rank(name, script, name, *args)
        if self.spec.regions > 1:
            self.start_daemons()
        self.expect_success(deadline=deadline)

    def expect_success(self, *, deadline: float) -> None:
        """Wait until all ranks end well; the first that does not is the AssertionError."""
        running = dict(self.ranks)
        while running:
            for process in (*self.daemons.values(), *running.values()):
                status = process.popen.poll()
                ended_well = status == 0 and process in running.values()
                assert status is None or ended_well, (
                    f"{process.name} ended with {status}:\n{self.all_tails()}"
                )
            running = {n: p for n, p in running.items() if p.popen.poll() is None}
            assert time.monotonic() < deadline, f"not done in time:\n{self.all_tails()}"
            time.sleep(0.02)

    def stop_daemons(self) -> dict[str, int]:
        """Stop the daemons in order. Returns their exit statuses."""
        # Once: a second signal may come when the daemon has already given up its handler.
        for daemon in self.daemons.values():
            daemon.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_LIMIT_S
        return {name: daemon.wait(deadline=deadline) for name, daemon in self.daemons.items()}

    def all_tails(self) -> str:
        everyone = [*self.daemons.values(), *self.ranks.values()]
        return "\n".join(f"--- {process.name}\n{process.tail()}" for process in everyone)
