"""`geotrain demo`: several regions on one machine, over links with real delay, train one model.

Everything is the real thing, each region a daemon and a training process of its own; only the
distance between them is emulated, by a lab: a network namespace for each region where the machine
allows it, else relays.
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from geotrain.errors import GeotrainError
from geotrain.lab.demo.options import SEED, Options, parse, ports_path, site_toml
from geotrain.lab.demo.report import Report, rtt_of_links
from geotrain.lab.processes import Child, start_child
from geotrain.lab.script import parse_script, read_script
from geotrain.lab.wan import Route, Wan, open_wan

_PLAIN_SCRIPT = Path(__file__).with_name("plain.py")
_START_LIMIT_S = 30.0
_STEP_LIMIT_S = 300.0
"""A step this long means that something is stuck; the slowest link allowed needs a tenth of it."""
_STOP_LIMIT_S = 5.0
_POLL_S = 0.02
_LISTEN_PORT = 7400
"""Of every daemon in a namespace of its own; on the loopback that all share, any free port."""


class DemoFailedError(GeotrainError):
    """A part of the demo ended or hung; says which, with its last words."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit status: 0, 1 for a failure, 128 + n for signal n."""
    started_at = time.monotonic()
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        return asyncio.run(_main(options, started_at))
    except BrokenPipeError:
        # Whoever read our output is gone; keep the interpreter from flushing into it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


async def _main(options: Options, started_at: float) -> int:
    received: list[signal.Signals] = []
    task = asyncio.current_task()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        if not received:  # The clean-up that the first signal began must not be interrupted.
            received.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    folder = Path(tempfile.mkdtemp(prefix="geotrain-demo-"))
    try:
        return await Demo(options, folder=folder, started_at=started_at).run()
    except DemoFailedError as error:
        print(f"geotrain demo: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        if not received:
            raise
        print(f"geotrain demo: stopped by {received[0].name}", file=sys.stderr)
        return 128 + received[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Demo:
    """One run: a lab, and for each region a daemon and a training process."""

    def __init__(self, options: Options, *, folder: Path, started_at: float) -> None:
        self._options = options
        self._folder = folder
        self._started_at = started_at
        self._report = Report(options=options)
        self._wan: Wan | None = None
        self._routes: list[Route] = []
        """From each region to the next."""
        self._daemons: list[Child] = []
        self._trainers: list[Child] = []
        self._ports: list[Mapping[str, Any]] = []
        self._progress_at = started_at

    async def run(self) -> int:
        """Raises DemoFailedError; whatever happens, no process is left."""
        try:
            return await self._run()
        finally:
            if self._wan is not None:
                await asyncio.to_thread(self._wan.close)

    async def _run(self) -> int:
        try:
            await self._open_lab()
            wan = self._wan
            _print(self._report.opening(f"{wan.kind}: {wan.reason}" if wan else ""))
            await self._start()
            await self._watch()
            statuses = [await self._status(index) for index in range(len(self._ports))]
        finally:
            await self._stop()
        wall_s = time.monotonic() - self._started_at
        options = self._options
        difference = await self._compare() if options.verify else None
        _print(
            self._report.summary(
                wall_s=wall_s,
                rtt_ms=rtt_of_links(options.names, statuses),
                verified=options.verify,
                difference=difference,
            )
        )
        return 1 if options.verify and difference != 0.0 else 0

    async def _open_lab(self) -> None:
        options = self._options
        if options.regions == 1:
            return
        wan = self._wan = await asyncio.to_thread(
            open_wan, options.emulator, sites=options.names, link=options.link, seed=SEED
        )
        if options.script is not None:  # what is wrong with it is told now, not when it is due
            parse_script(
                read_script(options.script), file=str(options.script), directions=wan.directions
            )
        wan.remove_at_end(self._folder)  # for the case that we cannot do it ourselves
        for source, target in itertools.pairwise(options.names):
            port = _LISTEN_PORT if wan.kind == "netns" else 0
            self._routes.append(wan.route(source, target, port))

    async def _start(self) -> None:
        names = self._options.names
        for index, name in enumerate(names):
            text = site_toml(
                self._options,
                index,
                folder=self._folder,
                listen=self._listen_address(name),
                dial=self._dial_address(index),
            )
            self._config(name).write_text(text, encoding="utf-8")
        # Importing torch takes the longest, so the training processes start along with the
        # daemons and wait for their sockets.
        if len(names) > 1:
            for name in names:
                self._daemons.append(await self._start_daemon(name))
        for index, name in enumerate(names):
            self._trainers.append(await self._start_trainer(index, name))
        for daemon, name in zip(self._daemons, names, strict=False):
            self._ports.append(await self._ports_of(daemon, name))
        if self._wan is not None and self._wan.kind == "relay":
            for route, ports in zip(self._routes, self._ports[1:], strict=True):
                self._wan.aim(route, _address(ports["listen"])[1])

    def _listen_address(self, name: str) -> str:
        if self._wan is None or self._wan.kind == "relay":
            return "127.0.0.1:0"
        return f"{self._wan.listen_host(name)}:{_LISTEN_PORT}"

    def _dial_address(self, index: int) -> str | None:
        if index >= len(self._routes):
            return None
        return f"{self._routes[index].host}:{self._routes[index].port}"

    def _config(self, name: str) -> Path:
        return self._folder / f"{name}.toml"

    async def _start_daemon(self, name: str) -> Child:
        module = [sys.executable, "-m", "geotrain"]
        return await self._start_child(
            [*module, "daemon", "--config", str(self._config(name))],
            site=name,
            name=f"daemon of {name}",
        )

    async def _start_trainer(self, index: int, name: str) -> Child:
        options = self._options
        command = [sys.executable, "-m", "geotrain.lab.demo.train"]
        command += ["--steps", str(options.steps), "--seed", str(SEED)]
        command += ["--batch", str(options.batch), "--layers", str(options.num_layers)]
        command += ["--json"] if index == 0 else []
        command += ["--save", str(self._saved(name))] if options.verify else []
        return await self._start_child(
            command,
            site=name,
            name=f"training process of {name}",
            environment={"GEOTRAIN_CONFIG": str(self._config(name))},
            pipe_stdout=index == 0,
        )

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
        if site is not None and self._wan is not None:
            command = self._wan.command(site, command)
        return await start_child(
            command,
            name=name,
            log=self._folder / f"{name.replace(' ', '-')}.log",
            environment={**os.environ, **own, **(environment or {})},
            pipe_stdout=pipe_stdout,
        )

    async def _ports_of(self, daemon: Child, name: str) -> Mapping[str, Any]:
        """The ports that a daemon got, from the file it writes once it listens."""
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline:
            if daemon.process.returncode is not None:
                raise DemoFailedError(daemon.describe_end())
            try:
                ports: dict[str, Any] = json.loads(ports_path(self._folder, name).read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                await asyncio.sleep(_POLL_S)
                continue
            return ports
        raise DemoFailedError(f"{daemon.name} did not listen within {_START_LIMIT_S:g} s")

    async def _watch(self) -> None:
        """Until every training process has ended well; the first that does not is the error."""
        children = [*self._daemons, *self._trainers]
        ends = {asyncio.create_task(child.process.wait()): child for child in children}
        reader = asyncio.create_task(self._read_steps(self._trainers[0]))
        remaining = set(self._trainers)
        try:
            while remaining or not reader.done():
                pending = [task for task in (*ends, reader) if not task.done()]
                await self._wait_for_any(pending)
                if reader.done():
                    reader.result()
                ended = [child for task, child in ends.items() if task.done()]
                failed = [c for c in ended if c in self._daemons or c.process.returncode != 0]
                if failed:
                    # A signal came from outside; what others then ran into is a consequence.
                    failed.sort(key=lambda child: (child.process.returncode or 0) >= 0)
                    raise DemoFailedError(failed[0].describe_end())
                remaining.difference_update(ended)
        finally:
            for task in (*ends, reader):
                task.cancel()
            await asyncio.gather(*ends, reader, return_exceptions=True)
        if not self._report.steps:
            raise DemoFailedError(f"{self._trainers[0].name} ended without a step")

    async def _wait_for_any(self, tasks: Sequence["asyncio.Task[Any]"]) -> None:
        while True:
            left_s = self._progress_at + _STEP_LIMIT_S - time.monotonic()
            if left_s <= 0:
                raise DemoFailedError(
                    f"no step for {_STEP_LIMIT_S:g} s; {self._trainers[0].describe_end()}"
                )
            done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return

    async def _read_steps(self, trainer: Child) -> None:
        while text := await trainer.stdout.readline():
            self._progress_at = time.monotonic()
            _print(self._report.step(json.loads(text)))
            if self._options.script is not None and len(self._report.steps) == 1:
                self._start_script(self._options.script)

    def _start_script(self, path: Path) -> None:
        assert self._wan is not None, "checked when the options were read"
        self._wan.start_script(read_script(path), file=str(path))

    async def _status(self, index: int) -> Mapping[str, Any] | None:
        """A daemon's status page, or None when it does not answer: the run itself went well."""
        host, port = _address(self._ports[index]["status"])
        assert self._wan is not None, "a daemon has links, and so a lab"
        sock = self._wan.socket(self._options.names[index])
        sock.setblocking(False)
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                await asyncio.get_running_loop().sock_connect(sock, (host, port))
                reader, writer = await asyncio.open_connection(sock=sock)
                writer.write(f"GET /status HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                answer = await reader.read()
                writer.close()
            _, _, body = answer.partition(b"\r\n\r\n")
            status: dict[str, Any] = json.loads(body)
        except (OSError, TimeoutError, json.JSONDecodeError):
            sock.close()
            return None
        return status

    async def _compare(self) -> float | None:
        """Train in one plain torch process and compare; None where a difference is not a number."""
        options = self._options
        command = [sys.executable, "-P", str(_PLAIN_SCRIPT), "--steps", str(options.steps)]
        command += ["--seed", str(SEED), "--batch", str(options.batch)]
        command += ["--microbatches", str(options.microbatches)]
        command += ["--layers", str(options.num_layers), "--compare"]
        command += [str(self._saved(name)) for name in options.names]
        child = await self._start_child(command, name="plain torch process", pipe_stdout=True)
        try:
            async with asyncio.timeout(_START_LIMIT_S + _STEP_LIMIT_S * options.steps):
                answer = await child.stdout.read()
                await child.process.wait()
        finally:
            await child.stop(timeout_s=_STOP_LIMIT_S)
        if child.process.returncode != 0:
            raise DemoFailedError(child.describe_end())
        difference: float | None = json.loads(answer)["max_abs_param_diff"]
        return difference

    async def _stop(self) -> None:
        # Training processes first, so that on a signal no daemon reports them as lost.
        for children in (self._trainers, self._daemons):
            await asyncio.gather(*(child.stop(timeout_s=_STOP_LIMIT_S) for child in children))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)
