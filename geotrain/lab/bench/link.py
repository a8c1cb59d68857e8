"""`geotrain bench link`: what a link between two sites carries, and how soon.

Over the lab two processes are two daemons without ranks. Over a real link each site runs this in
place of its daemon, and both print the figures.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from geotrain.config import Config, load_config
from geotrain.configuration.rules import split_address
from geotrain.daemon.place import Place
from geotrain.daemon.tls import site_tls
from geotrain.errors import ConfigError
from geotrain.lab.bench.link_end import End, EndFailedError
from geotrain.lab.bench.link_options import EndPlan, LinkBench
from geotrain.lab.bench.link_report import report, table
from geotrain.lab.bench.sites import (
    BenchFailedError,
    Sites,
    in_lab,
    next_line,
    progress,
    run_until_signal,
    stop,
)
from geotrain.lab.certificates import make_certificates
from geotrain.lab.processes import Child, isolated_module
from geotrain.observability.log import setup_logging
from geotrain.transport.tls import TlsFiles

_START_LIMIT_S = 30.0
_MARGIN_S = 240.0
"""Over the times asked for: the ends have deadlines of their own, which name what is missing."""
_PEER_LIMIT_S = 600.0
"""For whoever starts the other site's end."""


def main(options: LinkBench) -> int:
    """Measure and print. Returns the exit status; an error says what went wrong."""
    if options.config is None:
        measure = in_lab(options, lambda sites: measure_link(sites, options))
    else:
        config = load_config(options.config)
        setup_logging()  # a person may have to find out why the other site is not there
        measure = _measure_real(options, config)
    result = run_until_signal(measure)
    if isinstance(result, int):
        return result
    print(json.dumps(result) if options.json else table(result), flush=True)
    return 0


async def measure_link(sites: Sites, options: LinkBench) -> dict[str, Any]:
    """In a lab that is open already: the report's fields."""
    load = os.getloadavg()[0]
    children: list[Child] = []
    tls = make_certificates(sites.folder, options.names) if options.tls else {}
    try:
        listener = await _start(sites, options, 1, url=None, tls=tls)
        children.append(listener)
        said = await _next(listener, [], limit_s=_START_LIMIT_S)
        url = _url(sites, options, said["port"])
        leader = await _start(sites, options, 0, url=url, tls=tls)
        children.append(leader)
        await _next(leader, [listener], limit_s=_START_LIMIT_S)
        progress(f"geotrain: {options.traffic.seconds:g} s, and {_before_s(options):.0f} s before")
        limit_s = _before_s(options) + options.seconds + _MARGIN_S
        figures = await _next(leader, [listener], limit_s=limit_s)
    finally:
        await stop(children)
    return report(
        options,
        figures,
        emulator="none" if _over_loopback(sites, options) else sites.wan.kind,
        sites_congestion=sites.wan.congestion,
        load=load,
        num_cpus=os.cpu_count(),
    )


def _before_s(options: LinkBench) -> float:
    return options.traffic.idle_s + options.traffic.warm_up_s


async def _start(
    sites: Sites, options: LinkBench, index: int, *, url: str | None, tls: Mapping[str, TlsFiles]
) -> Child:
    name = options.names[index]
    host = sites.wan.listen_host(name)
    files = tls.get(name)
    paths = None if files is None else {key: str(path) for key, path in asdict(files).items()}
    plan = options.plan(index, url=url, host=host, port=0, tls=paths)
    command = isolated_module("geotrain.lab.bench.link_process", [plan.to_json()])
    return await sites.start(name, command, name=f"link end in {name}", pipe_stdout=True)


async def _next(child: Child, others: list[Child], *, limit_s: float) -> Any:
    try:
        return await next_line(child, others, limit_s=limit_s)
    except TimeoutError as error:
        raise BenchFailedError(f"nothing for {limit_s:.0f} s; {child.describe_end()}") from error


def _url(sites: Sites, options: LinkBench, port: int) -> str:
    """Where the leading end dials the port at which the other one listens."""
    near, far = options.names
    scheme = "https" if options.tls else "http"
    if _over_loopback(sites, options):
        return f"{scheme}://{sites.wan.listen_host(far)}:{port}"
    route = sites.wan.route(near, far, port)
    return f"{scheme}://{route.host}:{route.port}"


def _over_loopback(sites: Sites, options: LinkBench) -> bool:
    return sites.wan.kind == "relay" and not options.is_emulated


async def _measure_real(options: LinkBench, config: Config) -> dict[str, Any]:
    place = Place.claim(config.socket_path)  # A daemon that serves this region has the port, too.
    try:
        load = os.getloadavg()[0]
        site_tls(config)  # here an error names its key
        plan = real_plan(options, config)
        progress(f"waiting for {plan.peer}, where the same is to be run: {_PEER_LIMIT_S:.0f} s")
        end = End(plan)
        try:
            figures = await end.run(connect_limit_s=_PEER_LIMIT_S, on_listening=lambda port: None)
        except EndFailedError as error:
            raise BenchFailedError(
                f"{error}\nRun `geotrain bench link --config FILE --peer {plan.region}` in region "
                f"{plan.peer}, in place of its daemon and with the same options"
            ) from error
        except OSError as error:
            raise BenchFailedError(
                f"cannot listen on {config.site.listen}: {error.strerror}; "
                "stop what uses the port, or change site.listen"
            ) from error
    finally:
        place.release()
    leader, other = sorted(figures, key=[one.name for one in config.run.regions].index)
    return report(
        options,
        {name: figures[name] for name in (leader, other)},
        emulator="none",
        sites_congestion=None,
        load=load,
        num_cpus=os.cpu_count(),
    )


def real_plan(options: LinkBench, config: Config) -> EndPlan:
    """This site's end of its link to the peer.

    Both sites' options are part of the run that the handshake compares: a difference, or a daemon
    at the other end, is refused with its name.

    Raises:
        ConfigError: The peer is no neighbour of this region.
    """
    peer = options.peer
    if peer not in config.neighbours:
        near = ", ".join(config.neighbours) or "none"
        raise ConfigError(f"--peer {peer}: no neighbour of {config.site.name}; there are: {near}")
    names = [region.name for region in config.run.regions]
    host, port = split_address(config.site.listen)
    files = config.tls_files
    traffic = {name: getattr(options, name) for name in ("message_bytes", "seconds", "both_ways")}
    return EndPlan(
        region=config.site.name,
        index=0 if config.index < names.index(peer) else 1,
        peer=peer,
        url=config.neighbours[peer].url,
        host=host,
        port=port,
        run_id=config.run.id,
        run={**config.run.canonical(), "bench": {**traffic, "lanes": options.lanes or 0}},
        traffic=replace(options.traffic, congestion=config.site.link.congestion),
        tls=None if files is None else {key: str(path) for key, path in files.items()},
    )
