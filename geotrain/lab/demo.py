"""`geotrain demo`: several regions on one machine, over links with real delay, train one model.

Everything is the real thing, each region a daemon and a training process of its own; only the
distance between them is emulated, by the relays that run in this process.
"""

import asyncio
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
from geotrain.lab.demo_report import Report, rtt_of_links
from geotrain.lab.demo_sites import SEED, Options, parse, ports_path, site_toml
from geotrain.lab.processes import Child, start_child
from geotrain.lab.wan import Relay

_PLAIN_SCRIPT = Path(__file__).with_name("plain.py")
_START_LIMIT_S = 30.0
_STEP_LIMIT_S = 300.0
"""A step this long means that something is stuck; the slowest link allowed needs a tenth of it."""
_STOP_LIMIT_S = 5.0
_POLL_S = 0.02


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
    """One run: relays in this process, and for each region a daemon and a training process."""

    def __init__(self, options: Options, *, folder: Path, started_at: float) -> None:
        self._options = options
        self._folder = folder
        self._started_at = started_at
        self._report = Report(options=options)
        self._relays: list[Relay] = []
        self._daemons: list[Child] = []
        self._trainers: list[Child] = []
        self._ports: list[Mapping[str, Any]] = []
        self._progress_at = started_at

    async def run(self) -> int:
        """Raises DemoFailedError; whatever happens, no process is left."""
        _print(self._report.opening())
        try:
            await self._start()
            await self._watch()
            statuses = [await self._status(ports) for ports in self._ports]
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

    async def _start(self) -> None:
        names = self._options.names
        dial_ports: list[int | None] = []
        for _ in names[1:]:
            relay = Relay(self._options.conditions)
            self._relays.append(relay)
            dial_ports.append(await relay.start())
        for index, (name, port) in enumerate(zip(names, [*dial_ports, None], strict=True)):
            text = site_toml(self._options, index, folder=self._folder, dial_port=port)
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
        for relay, ports in zip(self._relays, self._ports[1:], strict=True):
            relay.aim(*_address(ports["listen"]))

    def _config(self, name: str) -> Path:
        return self._folder / f"{name}.toml"

    async def _start_daemon(self, name: str) -> Child:
        module = [sys.executable, "-m", "geotrain"]
        return await self._start_child(
            [*module, "daemon", "--config", str(self._config(name))], name=f"daemon of {name}"
        )

    async def _start_trainer(self, index: int, name: str) -> Child:
        options = self._options
        command = [sys.executable, "-m", "geotrain.lab.train"]
        command += ["--steps", str(options.steps), "--seed", str(SEED)]
        command += ["--batch", str(options.batch), "--layers", str(options.num_layers)]
        command += ["--json"] if index == 0 else []
        command += ["--save", str(self._saved(name))] if options.verify else []
        return await self._start_child(
            command,
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
        environment: Mapping[str, str] | None = None,
        pipe_stdout: bool = False,
    ) -> Child:
        own = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        own["TMPDIR"] = str(self._folder)  # so that the caches of libraries go with it
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

    async def _status(self, ports: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A daemon's status page, or None when it does not answer: the run itself went well."""
        host, port = _address(ports["status"])
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(f"GET /status HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                answer = await reader.read()
                writer.close()
            _, _, body = answer.partition(b"\r\n\r\n")
            status: dict[str, Any] = json.loads(body)
        except (OSError, TimeoutError, json.JSONDecodeError):
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
        for relay in self._relays:
            await relay.close()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)
