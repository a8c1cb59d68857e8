"""`geotrain bench step`: how long a step takes over long-distance links.

Daemons, training processes, links and tensors are real; only the stages sleep instead of
computing, so that the figures are the pipeline's and not this machine's.
"""

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from geotrain.control.journal import Entry
from geotrain.lab.bench.options import BenchOptions, plan_log_path, site_toml, times_path
from geotrain.lab.bench.peers import measure_torch
from geotrain.lab.bench.phases import phase_rows, plan_row
from geotrain.lab.bench.report import report, table
from geotrain.lab.bench.sites import (
    FEWEST_STEPS,
    BenchFailedError,
    Sites,
    in_lab,
    next_line,
    next_lines,
    progress,
    run_until_signal,
    stop,
)
from geotrain.lab.demo.options import ports_path
from geotrain.lab.processes import Child, own_module
from geotrain.lab.wan import Route

_START_LIMIT_S = 120.0
_LISTEN_PORT = 7400
"""Of every daemon in a namespace of its own; on the loopback that all share, any free port."""
_POLL_S = 0.02


def main(options: BenchOptions) -> int:
    """Measure and print. Returns the exit status; BenchFailedError says what went wrong."""
    result = run_until_signal(in_lab(options, lambda sites: _measure(sites, options)))
    if isinstance(result, int):
        return result
    print(json.dumps(result) if options.json else table(result), flush=True)
    return 0


async def _measure(sites: Sites, options: BenchOptions) -> dict[str, Any]:
    load = os.getloadavg()[0]
    steps, lanes, started_s = await _measure_geotrain(sites, options)
    progress(f"geotrain: {statistics.median(s['step_s'] for s in steps[1:]):.3f} s")
    return report(
        options,
        step_s=statistics.median(step["step_s"] for step in steps[1:]),
        steps=steps,
        emulator=sites.wan.kind,
        congestion={"sites": sites.wan.congestion, "geotrain": lanes},
        load=load,
        peers=await measure_torch(sites, options) if options.against_torch else None,
        taken=_taken(sites),
        plans=[plan_row(entry) for entry in _plans(sites)],
        phases=_phases(sites, options, steps, started_s),
    )


def _taken(sites: Sites) -> list[dict[str, float]] | None:
    """What a forward and a backward took in each region, the median of the steps' means."""
    found = []
    try:
        for name in sites.names:
            steps = json.loads(times_path(sites.folder, name).read_text(encoding="utf-8"))
            found.append(
                {key: statistics.median(step[key] for step in steps[1:]) for key in steps[0]}
            )
    except FileNotFoundError:  # a way that ran out of time is ended where it is
        return None
    return found


def _phases(
    sites: Sites, options: BenchOptions, steps: list[Mapping[str, Any]], started_s: float
) -> list[dict[str, Any]]:
    if options.script is None:
        return []
    return phase_rows(options, steps, _plans(sites), started_s=started_s)


def _plans(sites: Sites) -> list[Entry]:
    """Those of the run, as its first region noted them."""
    text = plan_log_path(sites.folder).read_text(encoding="utf-8")
    return [Entry.from_line(line) for line in text.splitlines()]


async def _measure_geotrain(
    sites: Sites, options: BenchOptions
) -> tuple[list[Mapping[str, Any]], str, float]:
    """The lines of the steps that ended in time, the congestion control of the links, and when
    the script was started (monotonic)."""
    progress(f"geotrain: starting {len(sites.names)} daemons and training processes")
    async with _regions(sites, options) as (daemons, ranks):
        ready = await next_line(ranks[0], [*daemons, *ranks[1:]], limit_s=_START_LIMIT_S)
        assert ready == {"ready": True}
        deadline = time.monotonic() + options.variant_limit_s

        async def take(count: int, *, behind: int = 0, ahead: int = 0) -> list[Mapping[str, Any]]:
            return await next_lines(
                ranks[0],
                [*daemons, *ranks[1:]],
                count=count,
                limit_s=max(0.0, deadline - time.monotonic()),
                what="geotrain",
                behind=behind,
                ahead=ahead,
            )

        later = options.work.steps - 1
        lines = await take(1, ahead=later)
        started_s = time.monotonic()
        if options.script is not None:
            script = options.script
            await asyncio.to_thread(sites.wan.start_script, script.text, file=script.file)
        lines += await take(later, behind=1) if lines else []
        if len(lines) < FEWEST_STEPS:
            done = f"{len(lines)} of {options.work.steps} steps in {options.variant_limit_s:.0f} s"
            raise BenchFailedError(f"{done}; {ranks[0].describe_end()}")
        lanes = await _congestion(sites)
        if len(lines) == options.work.steps:
            async with asyncio.timeout(_START_LIMIT_S):
                await asyncio.gather(*(rank.process.wait() for rank in ranks))
        return lines, lanes, started_s


@contextlib.asynccontextmanager
async def _regions(
    sites: Sites, options: BenchOptions
) -> AsyncIterator[tuple[list[Child], list[Child]]]:
    """A daemon and a rank in every site."""
    wan, daemons, ranks = sites.wan, list[Child](), list[Child]()
    is_relayed = wan.kind == "relay"
    port = 0 if is_relayed else _LISTEN_PORT
    routes = [wan.route(*pair, port) for pair in itertools.pairwise(sites.names)]
    try:
        for index, name in enumerate(sites.names):
            host = "127.0.0.1" if is_relayed else wan.listen_host(name)
            dial = f"{routes[index].host}:{routes[index].port}" if index < len(routes) else None
            toml = site_toml(
                options, index, folder=sites.folder, listen=f"{host}:{port}", dial=dial
            )
            file = sites.folder / f"{name}.toml"
            file.write_text(toml, encoding="utf-8")
            command = own_module("geotrain", ["daemon", "--config", str(file)])
            daemons.append(await sites.start(name, command, name=f"daemon of {name}"))
        for index, name in enumerate(sites.names):
            ranks.append(await _start_rank(sites, options, name, is_first=index == 0))
        if is_relayed:
            await _aim(sites, routes, daemons)
        yield daemons, ranks
    finally:
        # Ranks first, so that on a signal no daemon reports them as lost.
        await stop(ranks)
        await stop(daemons)


async def _start_rank(sites: Sites, options: BenchOptions, name: str, *, is_first: bool) -> Child:
    return await sites.start(
        name,
        own_module("geotrain.lab.bench.rank", [options.work.to_json()]),
        name=f"training process of {name}",
        environment={"GEOTRAIN_CONFIG": str(sites.folder / f"{name}.toml")},
        pipe_stdout=is_first,
    )


async def _aim(sites: Sites, routes: list[Route], daemons: list[Child]) -> None:
    """Point the relays at the ports that the daemons got."""
    for route, name, daemon in zip(routes, sites.names[1:], daemons[1:], strict=True):
        async with asyncio.timeout(_START_LIMIT_S):
            while (ports := _ports(sites, name)) is None:
                if daemon.process.returncode is not None:
                    raise BenchFailedError(daemon.describe_end())
                await asyncio.sleep(_POLL_S)
        sites.wan.aim(route, int(ports["listen"].rpartition(":")[2]))


def _ports(sites: Sites, name: str) -> Mapping[str, Any] | None:
    """What a daemon writes once it listens."""
    try:
        ports: dict[str, Any] = json.loads(ports_path(sites.folder, name).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return ports


async def _congestion(sites: Sites) -> str:
    """What the daemons' links run with, every end of them; "" where no status page says."""
    found = [name for site in sites.names for name in await _congestion_at(sites, site)]
    return ", ".join(sorted(set(found)))


async def _congestion_at(sites: Sites, site: str) -> list[str]:
    ports = _ports(sites, site)
    if ports is None:
        return []
    host, _, port = ports["status"].rpartition(":")
    sock = sites.wan.socket(site)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(5.0):
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            reader, writer = await asyncio.open_connection(sock=sock)
            writer.write(f"GET /status HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            _, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
        links: dict[str, Any] = json.loads(body)["links"]
        return [str(link["congestion"]) for link in links.values() if link["congestion"]]
    except (OSError, TimeoutError, ValueError, KeyError):
        sock.close()
        return []
