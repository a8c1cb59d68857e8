"""`geotrain demo`: several regions on one machine, over links with real delay, train one model.

Everything is the real thing, each region a daemon and a training process of its own; only the
distance between them is emulated, by a lab: a network namespace for each region where the machine
allows it, else relays.
"""

import asyncio
import contextlib
import errno
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from geotrain.lab.demo.comparison import compare
from geotrain.lab.demo.feed import Feed
from geotrain.lab.demo.launch import LISTEN_PORT, START_LIMIT_S, DemoFailedError, Launcher
from geotrain.lab.demo.options import SEED, Options, parse
from geotrain.lab.demo.report import Report, rtt_of_links
from geotrain.lab.demo.screen import LiveScreen, can_show
from geotrain.lab.demo.state import RunState, StepLine
from geotrain.lab.folder import temporary_folder
from geotrain.lab.processes import Child, cancel_on_signals
from geotrain.lab.script import parse_script, read_script
from geotrain.lab.wan import Route, Wan, open_wan

_STEP_LIMIT_S = 300.0
"""A step this long means that something is stuck; the slowest link allowed needs a tenth of it."""
_STOP_LIMIT_S = 5.0
_ASK_S, _FRAME_S = 0.5, 0.25
_BASELINE_STEPS = 3
"""The first only warms up."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit status: 0, 1 for a failure, 128 + n for signal n."""
    started_at = time.monotonic()
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        return asyncio.run(_main(options, started_at))
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        if error.errno == errno.EIO:
            # Most often a terminal that was closed, and then this fails too; but also a bad disk.
            with contextlib.suppress(OSError):
                print(f"geotrain demo: {error}", file=sys.stderr)
        # Whoever read our output is gone; keep the interpreter from flushing into it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


async def _main(options: Options, started_at: float) -> int:
    received: list[signal.Signals] = []
    cancel_on_signals(received)
    try:
        with temporary_folder("geotrain-demo-", options.names) as folder:
            return await Demo(options, folder=folder, started_at=started_at).run()
    except DemoFailedError as error:
        print(f"geotrain demo: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        if not received:
            raise
        print(f"geotrain demo: stopped by {received[0].name}", file=sys.stderr)
        return 128 + received[0]


class Demo:
    """One run: a lab, and for each region a daemon and a training process."""

    def __init__(self, options: Options, *, folder: Path, started_at: float) -> None:
        self._options = options
        self._folder = folder
        self._state = RunState(options, started_at=started_at)
        self._report = Report(state=self._state, num_cpus=os.cpu_count() or 1)
        self._screen: LiveScreen | None = None
        self._feed: Feed | None = None
        self._wan: Wan | None = None
        self._routes: list[Route] = []
        self._daemons: list[Child] = []
        self._trainers: list[Child] = []
        self._helpers: list[asyncio.Task[None]] = []
        """What goes on beside the training: asking, drawing."""
        self._progress_at = started_at

    async def run(self) -> int:
        """Raises DemoFailedError; whatever happens, no process is left."""
        try:
            return await self._run()
        finally:
            if self._wan is not None:
                await asyncio.to_thread(self._wan.close)

    async def _run(self) -> int:
        options, state = self._options, self._state
        try:
            wan = await self._open_lab()
            state.emulator = f"{wan.kind}: {wan.reason}"
            _print(self._report.opening())
            self._show()
            if self._screen is None:
                _print(self._report.starting())
            self._helpers.append(asyncio.create_task(self._tell()))
            launcher = await self._start(wan)
            await self._watch()
            if self._feed is not None:
                await self._feed.ask_all()
            if self._screen is None:
                self._print_changes()
        finally:
            state.ended_at = time.monotonic()
            await _cancel(self._helpers)
            try:
                if self._screen is not None:
                    self._screen.stop()
            finally:
                await self._stop()
        wall_s = time.monotonic() - state.started_at
        plain = await self._run_plain(launcher)
        step_s = plain.get("step_s")
        comparison = compare(
            state, single_process_step_s=statistics.median(step_s[1:] or step_s) if step_s else None
        )
        difference = plain.get("max_abs_param_diff")
        rtt_ms = rtt_of_links(options.names, [region.status for region in state.regions])
        _print(
            self._report.summary(comparison, wall_s=wall_s, rtt_ms=rtt_ms, difference=difference)
        )
        return 1 if options.verify and difference != 0.0 else 0

    async def _open_lab(self) -> Wan:
        options = self._options
        if options.regions > 1:
            opened = asyncio.to_thread(
                open_wan, options.emulator, sites=options.names, link=options.link, seed=SEED
            )
        else:
            # Without links to emulate, but a lab's keeper also removes our folder if we cannot.
            opened = asyncio.to_thread(open_wan, "relay", sites=(options.names[0], "nowhere"))
        wan = self._wan = await opened
        wan.remove_at_end(self._folder)
        if options.script is not None:  # what is wrong with it is told now, not when it is due
            parse_script(
                read_script(options.script), file=str(options.script), directions=wan.directions
            )
        for source, target in itertools.pairwise(options.names):
            port = LISTEN_PORT if wan.kind == "netns" else 0
            self._routes.append(wan.route(source, target, port))
        return wan

    def _show(self) -> None:
        """From now on in the live view, where there is a terminal for it."""
        console = Console()
        if not self._options.json and not self._options.plain and can_show(console):
            self._screen = LiveScreen(self._state, console)
            self._screen.start()

    async def _start(self, wan: Wan) -> Launcher:
        names = self._options.names
        launcher = Launcher(self._options, folder=self._folder, wan=wan, routes=self._routes)
        launcher.write_configs()
        # Importing torch takes the longest, so the training processes start along with the
        # daemons and wait for their sockets.
        if len(names) > 1:
            for name in names:
                self._daemons.append(await launcher.start_daemon(name))
        for name in names:
            self._trainers.append(await launcher.start_trainer(name))
        ports = []
        for pair in zip(self._daemons, names, strict=False):
            ports.append(await launcher.ports_of(*pair))
            self._state.num_listening += 1
        if wan.kind == "relay":
            for route, of_target in zip(self._routes, ports[1:], strict=False):
                wan.aim(route, int(of_target["listen"].rpartition(":")[2]))
        if ports:
            self._feed = Feed(self._state, wan, [one["status"] for one in ports])
            if not self._options.json:
                self._helpers.append(asyncio.create_task(self._feed.run(interval_s=_ASK_S)))
        return launcher

    # ---- while it runs

    async def _watch(self) -> None:
        """Until every training process has ended well; the first that does not is the error."""
        children = [*self._daemons, *self._trainers]
        ends = {asyncio.create_task(child.process.wait()): child for child in children}
        readers = [
            asyncio.create_task(self._read_lines(index, trainer))
            for index, trainer in enumerate(self._trainers)
        ]
        remaining = set(self._trainers)
        try:
            while remaining or not all(reader.done() for reader in readers):
                pending = [task for task in (*ends, *readers, *self._helpers) if not task.done()]
                await self._wait_for_any(pending)
                for helper in (*readers, *self._helpers):
                    if helper.done():
                        helper.result()
                ended = [child for task, child in ends.items() if task.done()]
                failed = [c for c in ended if c in self._daemons or c.process.returncode != 0]
                if failed:
                    # A signal came from outside; what others then ran into is a consequence.
                    failed.sort(key=lambda child: (child.process.returncode or 0) >= 0)
                    raise DemoFailedError(failed[0].describe_end())
                remaining.difference_update(ended)
        finally:
            await _cancel([*ends, *readers])
        if not self._state.losses:
            raise DemoFailedError(f"{self._trainers[0].name} ended without a step")

    async def _tell(self) -> None:
        """Draw, or print what changed; steps are printed when they come."""
        while True:
            if self._screen is not None:
                self._screen.draw()
            else:
                self._print_changes()
            await asyncio.sleep(_FRAME_S)

    def _print_changes(self) -> None:
        for change in self._state.changes.take():
            _print(self._report.change(change))

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

    async def _read_lines(self, index: int, trainer: Child) -> None:
        """Every region's lines are read as they come, so that none waits for a full pipe."""
        while text := await trainer.stdout.readline():
            try:
                record = json.loads(text)
                line = StepLine.from_json(record)
            except (ValueError, KeyError, TypeError):
                continue  # a library's word on stdout, say
            self._state.on_line(index, line)
            if index == 0:
                self._on_step(record)

    def _on_step(self, record: Mapping[str, Any]) -> None:
        self._progress_at = time.monotonic()
        if self._screen is None:
            _print(self._report.step(record))
        if self._options.script is not None and len(self._state.losses) == 1:
            assert self._wan is not None, "opened before anything starts"
            self._wan.start_script(
                read_script(self._options.script), file=str(self._options.script)
            )

    # ---- the end

    async def _run_plain(self, launcher: Launcher) -> Mapping[str, Any]:
        """What one plain torch process says, with the machine to itself; empty where not asked."""
        options = self._options
        if options.no_baseline and not options.verify:
            return {}
        num_steps = options.steps if options.verify else _BASELINE_STEPS
        _print(self._report.baseline_begins(num_steps))
        child = await launcher.start_plain(steps=num_steps)
        try:
            async with asyncio.timeout(START_LIMIT_S + _STEP_LIMIT_S * num_steps):
                answer = await child.stdout.read()
                await child.process.wait()
        finally:
            await child.stop(timeout_s=_STOP_LIMIT_S)
        if child.process.returncode != 0:
            raise DemoFailedError(child.describe_end())
        told: dict[str, Any] = json.loads(answer)
        return told

    async def _stop(self) -> None:
        # Training processes first, so that on a signal no daemon reports them as lost.
        for children in (self._trainers, self._daemons):
            await asyncio.gather(*(child.stop(timeout_s=_STOP_LIMIT_S) for child in children))


async def _cancel(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)
