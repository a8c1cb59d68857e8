"""The same work on torch.distributed.pipelining over gloo, on the same emulated links."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from geotrain.lab.bench.options import BenchOptions
from geotrain.lab.bench.schedule import warm_up_widths
from geotrain.lab.bench.sites import (
    FEWEST_STEPS,
    BenchFailedError,
    Sites,
    next_line,
    next_lines,
    stop,
)
from geotrain.lab.processes import Child, own_module

_PORT = 29500
_START_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way of running the work that was tried."""

    step_s: float | None
    """Median after the first; None where it did not get there."""
    note: str
    """Why there is none, or not of all steps, in a few words."""


async def measure_torch(sites: Sites, options: BenchOptions) -> dict[str, Peer] | str:
    """Every way that was tried, by name; or why there can be none, in a sentence.

    Each has its own deadline: with lost segments gloo may take forever. What hung is ended, and
    the rest is run by new processes.
    """
    if sites.wan.kind != "netns":
        return "no comparison with torch: gloo needs sites with addresses of their own, not relays"
    for index in range(len(sites.names)):
        await give_device_an_address(sites, index)
    widths = warm_up_widths(
        options.hiding_windows[0],
        num_stages=options.work.num_stages,
        num_microbatches=options.work.first_count,
    )
    remaining = ["1f1b", "gpipe", *(f"csv{width}" for width in widths)]
    found: dict[str, Peer] = {}
    while remaining:
        done = await _run(sites, options, remaining, attempt=len(found))
        found |= done
        remaining = [variant for variant in remaining if variant not in done]
    return found


async def _run(
    sites: Sites, options: BenchOptions, variants: Sequence[str], *, attempt: int
) -> dict[str, Peer]:
    """Run variants in one set of processes, up to the first that does not end in time."""
    ranks: list[Child] = []
    done: dict[str, Peer] = {}
    # Another port each time: the last one's connections may still be closing.
    store = f"tcp://{sites.wan.sites[sites.names[0]].address}:{_PORT + attempt}"
    try:
        for rank in range(len(sites.names)):
            ranks.append(await _start_rank(sites, options, rank, store, variants))
        variant = variants[0]  # what does not even start is told of the first
        try:
            await next_line(ranks[0], ranks[1:], limit_s=_START_LIMIT_S)
            for variant in variants:
                lines = await next_lines(
                    ranks[0],
                    ranks[1:],
                    count=options.work.steps,
                    limit_s=options.variant_limit_s,
                    what=f"torch: {variant}",
                )
                done[variant] = peer_of([line["step_s"] for line in lines], options)
                if len(lines) < options.work.steps:
                    break
        except TimeoutError:
            note = f"its ranks did not meet within {_START_LIMIT_S:.0f} s"
            done[variant] = Peer(step_s=None, note=note)
        except BenchFailedError as error:
            done[variant] = Peer(step_s=None, note=_in_short(error))
    finally:
        await stop(ranks)
    return done


def peer_of(step_s: Sequence[float], options: BenchOptions) -> Peer:
    """What the steps that ended in time come to; the first is never counted."""
    asked, limit_s = options.work.steps, options.variant_limit_s
    if len(step_s) < FEWEST_STEPS:
        note = f"none within {limit_s:.0f} s ({len(step_s)} of {asked} steps done)"
        return Peer(step_s=None, note=note)
    note = f"{len(step_s)} of {asked} steps within {limit_s:.0f} s" if len(step_s) < asked else ""
    return Peer(step_s=statistics.median(step_s[1:]), note=note)


def _in_short(error: BenchFailedError) -> str:
    """How it ended, and its last word."""
    first, *others = str(error).splitlines()
    return f"{first} {others[-1]}" if others else first


async def _start_rank(
    sites: Sites, options: BenchOptions, rank: int, store: str, variants: Sequence[str]
) -> Child:
    command = own_module("geotrain.lab.bench.torch_rank", [options.work.to_json()])
    command += [str(rank), store, ",".join(variants)]
    return await sites.start(
        sites.names[rank],
        command,
        name=f"torch rank {rank}",
        environment={"GLOO_SOCKET_IFNAME": device_towards_neighbour(sites, rank)},
        pipe_stdout=rank == 0,
    )


def device_towards_neighbour(sites: Sites, index: int) -> str:
    """The device of a site towards a neighbour."""
    return f"wan{index + 1 if index + 1 < len(sites.names) else index - 1}"


async def give_device_an_address(sites: Sites, index: int) -> None:
    """gloo finds its own address by a device, and the lab keeps a site's on its loopback."""
    name = sites.names[index]
    address = f"{sites.wan.sites[name].address}/32"
    command = ["ip", "addr", "add", address, "dev", device_towards_neighbour(sites, index)]
    child = await sites.start(name, command, name=f"ip in {name}")
    if await child.process.wait() != 0:
        raise BenchFailedError(child.describe_end())
