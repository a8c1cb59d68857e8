"""A lab for one measurement, and the processes that are started in its sites."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from geotrain.errors import GeotrainError
from geotrain.lab.bench.options import SEED
from geotrain.lab.folder import temporary_folder
from geotrain.lab.processes import Child, cancel_on_signals, start_child
from geotrain.lab.settings import LinkSettings
from geotrain.lab.wan import Kind, Wan, open_wan

STOP_LIMIT_S = 5.0
FEWEST_STEPS = 2
"""The first is never counted: the connections are still finding their rate."""


class BenchFailedError(GeotrainError):
    """A part of the measurement ended or hung; says which, with its last words."""


class LabOptions(Protocol):
    """What a lab needs to know of a measurement."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def link(self) -> LinkSettings: ...
    @property
    def congestion(self) -> str | None: ...
    @property
    def emulator(self) -> Kind: ...


class Sites:
    """The lab and a folder for logs; `close` leaves nothing behind."""

    def __init__(self, wan: Wan, options: LabOptions, folder: Path) -> None:
        self.wan = wan
        self.names = options.names
        self.folder = folder

    @classmethod
    async def open(cls, options: LabOptions, folder: Path) -> "Sites":
        wan = await asyncio.to_thread(
            open_wan,
            options.emulator,
            sites=options.names,
            link=options.link,
            congestion=options.congestion,
            seed=SEED,
        )
        wan.remove_at_end(folder)  # for the case that we cannot do it ourselves
        return cls(wan, options, folder)

    async def close(self) -> None:
        await asyncio.to_thread(self.wan.close)

    async def start(
        self,
        site: str,
        command: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str] | None = None,
        pipe_stdout: bool = False,
    ) -> Child:
        """Start a process in a site; it does not outlive this one."""
        own = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        own["TMPDIR"] = str(self.folder)  # so that the caches of libraries go with it
        return await start_child(
            self.wan.command(site, command),
            name=name,
            log=self.folder / f"{name.replace(' ', '-')}.log",
            environment={**os.environ, **own, **(environment or {})},
            pipe_stdout=pipe_stdout,
        )


def run_until_signal(measure: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | int:
    """Run a measurement; a signal ends it in order. Returns its result, or the exit status."""
    received: list[signal.Signals] = []

    async def run() -> dict[str, Any]:
        cancel_on_signals(received)
        return await measure

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if not received:
            raise
        print(f"geotrain bench: stopped by {received[0].name}", file=sys.stderr)
        return 128 + received[0]


async def in_lab(
    options: LabOptions, measure: Callable[[Sites], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Measure in a lab and a folder of its own, of which nothing is left afterwards."""
    with temporary_folder("geotrain-bench-", options.names) as folder:
        sites = await Sites.open(options, folder)
        try:
            return await measure(sites)
        finally:
            await sites.close()


async def next_line(child: Child, others: Sequence[Child], *, limit_s: float) -> Mapping[str, Any]:
    """The next JSON line of `child`.

    Raises:
        TimeoutError: There was none in time.
        BenchFailedError: It ended, or one of the others did with an error.
    """
    deadline = time.monotonic() + limit_s
    reading = asyncio.create_task(child.stdout.readline())
    try:
        while not reading.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait([reading], timeout=min(left_s, 0.25))
            for each in others:
                if each.process.returncode:
                    raise BenchFailedError(each.describe_end())
        text = reading.result()
    finally:
        reading.cancel()
    if not text:
        await child.process.wait()
        failed = [each for each in (child, *others) if each.process.returncode]
        raise BenchFailedError((failed or [child])[0].describe_end())
    line: dict[str, Any] = json.loads(text)
    return line


async def next_lines(
    child: Child,
    others: Sequence[Child],
    *,
    count: int,
    limit_s: float,
    what: str,
    behind: int = 0,
    ahead: int = 0,
) -> list[Mapping[str, Any]]:
    """The next `count` JSON lines of `child`, or as many as there are in time.

    Args:
        behind, ahead: How many come before and after them, for whoever waits.

    Raises:
        BenchFailedError: It ended, or one of the others did with an error.
    """
    lines = list[Mapping[str, Any]]()
    deadline = time.monotonic() + limit_s
    while len(lines) < count:
        number, last = behind + len(lines) + 1, behind + count + ahead
        progress(f"{what}: step {number} of {last}, {limit_s:.0f} s at most for all")
        try:
            left_s = deadline - time.monotonic()
            lines.append(await next_line(child, others, limit_s=left_s))
        except TimeoutError:
            break
    return lines


def progress(text: str) -> None:
    """To whoever waits; stdout has the result alone."""
    print(f"  {text}", file=sys.stderr, flush=True)


async def stop(children: Sequence[Child]) -> None:
    await asyncio.gather(*(child.stop(timeout_s=STOP_LIMIT_S) for child in children))
