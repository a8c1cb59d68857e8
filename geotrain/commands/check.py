"""`geotrain check`: what a correct config file comes to, and whether the machine can hold it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from geotrain.config import Config
from geotrain.daemon.tls import site_tls, warnings
from geotrain.errors import ConfigError, Problem
from geotrain.transport.congestion import InForce, probe
from geotrain.transport.tls import Tls

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """How much memory this process may use, and who says so."""

    limit_bytes: int
    source: str


def check(config: Config) -> int:
    """Print the summary. ConfigError where the arena cannot fit, or a certificate is not good."""
    memory = memory_limit()
    problem = arena_problem(config, memory)
    problems = [] if problem is None else [problem]
    tls = None
    try:
        tls = site_tls(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    print(f"{config.path} is fine")
    for label, text in summary(config, memory, tls):
        print(f"  {label:<10}{text}")
    return 0


def arena_problem(config: Config, memory: MemoryLimit) -> Problem | None:
    """The arena counts against the memory cgroup, and is really allocated at attach."""
    limit_mib = memory.limit_bytes // _MIB
    if config.site.arena_mib < limit_mib:
        return None
    allowed = f"must be below {limit_mib} MiB, {memory.source}"
    return Problem(
        file=str(config.path),
        key="site.arena_mib",
        value=str(config.site.arena_mib),
        allowed=allowed,
    )


def summary(config: Config, memory: MemoryLimit, tls: Tls | None) -> Iterator[tuple[str, str]]:
    """Each line of the summary as (label, text)."""
    run, site = config.run, config.site
    steps = f"{run.steps} steps" if run.steps is not None else "steps as the script says"
    yield "run", f"{run.id}, {steps}, hash {run.hash[:12]}"
    yield (
        "step",
        f"{run.global_batch} samples in {run.plan.microbatches} microbatches, {run.precision}, "
        f"window {run.plan.window}",
    )
    for index, region in enumerate(run.regions):
        this = " (this site)" if index == config.index else ""
        yield "region" if index == 0 else "", f"{region.name}: layers {region.layers}{this}"
    yield "listen", f"{site.listen}, status page {site.status}"
    for name, peer in config.neighbours.items():
        where = f"dialled at {peer.url}" if peer.url else "must dial this site (no url here)"
        yield "peer", f"{name}: {where}, egress {peer.egress_usd_per_gb:g} $/GB"
    if config.neighbours:
        yield "links", congestion(site.link.congestion, probe(site.link.congestion))
    if tls is not None:
        yield "", f"encrypted with TLS 1.3; this site's certificate is good until {tls.ends}"
        for text in warnings(tls).texts:
            yield "warning", text
    elif config.neighbours:
        yield "", "not encrypted: no [site.tls] here"
    yield "socket", str(config.socket_path)
    limit_mib = memory.limit_bytes // _MIB
    much = "; the arena takes over half" if 2 * site.arena_mib > limit_mib else ""
    yield (
        "arena",
        f"{site.arena_mib} MiB for each rank; {limit_mib} MiB is {memory.source}{much}",
    )


def congestion(wanted: str, in_force: InForce) -> str:
    """What the links of a daemon of this user would run under, and why not what is wanted."""
    found = f"congestion control {in_force.name or 'as the system has it'}"
    return f"{found}; {in_force.refused}" if in_force.refused else f"{found} ({wanted})"


def memory_limit(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> MemoryLimit:
    """The tightest of the machine's memory and the limits of the cgroups around this process."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [MemoryLimit(limit_bytes=machine_bytes, source="what this machine has")]
    for file in _limit_files(proc, cgroups):
        try:
            text = file.read_text().strip()
        except OSError:  # not mounted, or not for us to see
            continue
        if text.isdigit():  # "max" is none; version 1 writes a number beyond any machine
            limits.append(
                MemoryLimit(limit_bytes=int(text), source=f"what the cgroup allows ({file})")
            )
    return min(limits, key=lambda limit: limit.limit_bytes)


def _limit_files(proc: Path, cgroups: Path) -> Iterator[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, name = [cgroups, cgroups / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [cgroups / "memory"], "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's: then only the mount's root is there.
        place = Path(path.lstrip("/"))
        for root in roots:
            for folder in (place, *place.parents):
                yield root / folder / name
