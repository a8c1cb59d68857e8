"""The same emulated link in turn under gloo, bare asyncio, plain sockets, iperf3 and geotrain.

    python tests/benchmarks/link_peers.py [--rtt-ms 100] [--mbit 1000] [--loss 0.001]
                                          [--congestion auto|cubic|bbr] [--seconds 10] [--flows 1,8]
                                          [--lanes auto|N]

As root: network namespaces, so that all meet the kernel's TCP. Prints one JSON object: Mbit/s of
each, counted over --seconds after the same warm-up, and geotrain's over each of the others. iperf3
only where it is installed. The others are plain; geotrain has TLS unless --no-tls is given.
`lane_over_flow` is what one of geotrain's `bulk_lanes` carries over what one plain flow does, the
faster of iperf3's and of plain sockets. Cubic with losses:

    python tests/benchmarks/link_peers.py --loss 0.001 --congestion cubic --seconds 30 --flows 1
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

from geotrain.lab.bench.link import measure_link
from geotrain.lab.bench.link_options import LinkBench
from geotrain.lab.bench.peers import device_towards_neighbour, give_device_an_address
from geotrain.lab.bench.progress import Progress
from geotrain.lab.bench.sites import Sites, in_lab
from geotrain.lab.selfcheck import ask, serving

MIB = 1 << 20
START_LIMIT_S = 60.0
MARGIN_S = 180.0
PORT = 29400
GLOO = {"gloo": (16, 1), "gloo_ahead": (1, 32)}
"""MiB of a tensor, and how many at once: one by one, and as many as a long path holds."""


# The peers: each is this file again, inside a site.


def gloo(rank: int, store: str, seconds: float, warm_up_s: float, *, mib: int, window: int) -> None:
    """Rank 0 sends tensors until rank 1, which counts, has ended; `window` are posted at once.

    gloo sends a tensor once the other end has said that it waits for it, a round trip each.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    tensors = [torch.zeros(mib * MIB, dtype=torch.uint8) for _ in range(window)]
    now = time.monotonic()
    progress = Progress(since=now + warm_up_s, until=now + warm_up_s + seconds)
    post = (lambda tensor: dist.isend(tensor, 1)) if rank == 0 else lambda t: dist.irecv(t, 0)
    works = collections.deque(post(tensor) for tensor in tensors)
    with contextlib.suppress(RuntimeError if rank == 0 else ()):
        for index in itertools.count():
            works.popleft().wait()
            progress.on_bytes(mib * MIB, now=time.monotonic())
            if rank == 1 and progress.ended_at is not None:
                break
            works.append(post(tensors[index % window]))
    if rank == 1:
        print(json.dumps({"bytes_per_s": progress.bytes_per_s}), flush=True)
    os._exit(0)  # gloo would wait for what is still posted


class Sink(asyncio.BufferedProtocol):
    """Receives into one buffer and counts."""

    def __init__(self, progress: Progress, done: asyncio.Future[None]) -> None:
        self._buffer = memoryview(bytearray(MIB))
        self._progress, self._done = progress, done

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._progress.on_bytes(nbytes, now=time.monotonic())
        if self._progress.ended_at is not None and not self._done.done():
            self._done.set_result(None)


async def bare_receive(host: str, seconds: float, warm_up_s: float) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    now = time.monotonic()
    progress = Progress(since=now + warm_up_s, until=now + warm_up_s + seconds)
    server = await loop.create_server(lambda: Sink(progress, done), host, 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.wait_for(done, warm_up_s + seconds + MARGIN_S)
    print(json.dumps({"bytes_per_s": progress.bytes_per_s}), flush=True)


async def bare_send(host: str, port: int) -> None:
    """Until it is ended, or the other one is."""
    _, writer = await asyncio.open_connection(host, port)
    data = memoryview(bytes(MIB))
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(data)
            await writer.drain()


# Whoever measures them.


class Bench:
    """All measurements over one open lab, one after another."""

    def __init__(self, sites: Sites, options: LinkBench) -> None:
        self._sites, self._wan = sites, sites.wan
        self._options = options
        self._near, self._far = options.names
        self._times = [str(options.seconds), str(options.traffic.warm_up_s)]
        self._limit_s = options.seconds + options.traffic.warm_up_s + MARGIN_S

    def popen(self, site: str, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, __file__, *arguments]
        return self._wan.popen(
            site, command, stdout=subprocess.PIPE, text=True, env={**os.environ, **options}
        )

    def gloo(self, name: str) -> float:
        # A port of its own each time: the last run's connections may still be closing.
        port = PORT + list(GLOO).index(name)
        store = f"tcp://{self._wan.sites[self._near].address}:{port}"
        ranks = []
        for rank, site in enumerate(self._options.names):
            device = device_towards_neighbour(self._sites, rank)
            role = ["--role", "gloo", str(rank), store, *self._times, *map(str, GLOO[name])]
            ranks.append(self.popen(site, *role, GLOO_SOCKET_IFNAME=device))
        return self._result(ranks, ranks[1])

    def bare(self) -> float:
        receiver = self.popen(
            self._far, "--role", "bare-receive", self._wan.listen_host(self._far), *self._times
        )
        assert receiver.stdout is not None
        port = json.loads(receiver.stdout.readline())["port"]
        route = self._wan.route(self._near, self._far, port)
        sender = self.popen(self._near, "--role", "bare-send", route.host, str(route.port))
        return self._result([receiver, sender], receiver)

    def sockets(self, num_flows: int) -> float:
        """The lab's own probe: threads and blocking sockets, paced by nothing."""
        with serving(self._wan, (self._near, self._far)) as address:
            duration_s = self._options.seconds + self._options.traffic.warm_up_s
            numbers = [str(duration_s), str(num_flows), str(self._options.seconds), "0"]
            return ask(self._wan, self._near, ["rate", *address, *numbers])["bytes_per_s"]

    def iperf3(self, num_flows: int) -> float:
        with self._wan.popen(self._far, ["iperf3", "-s", "-1"], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()  # it says that it listens
            address = self._wan.sites[self._far].address
            command = ["iperf3", "-c", address, "-J", "-P", str(num_flows)]
            command += ["-t", str(self._options.seconds)]
            command += ["-O", str(round(self._options.traffic.warm_up_s))]
            client = self._wan.popen(self._near, command, stdout=subprocess.PIPE)
            out, _ = client.communicate(timeout=self._limit_s)
        return float(json.loads(out)["end"]["sum_received"]["bits_per_second"]) / 8

    def _result(self, processes: "list[subprocess.Popen[str]]", told_by: Any) -> float:
        try:
            out, _ = told_by.communicate(timeout=self._limit_s)
            return float(json.loads(out.splitlines()[-1])["bytes_per_s"])
        finally:
            for process in processes:
                process.kill()
                process.wait()


async def measure(sites: Sites, options: LinkBench, flows: list[int]) -> dict[str, Any]:
    bench = Bench(sites, options)
    load = os.getloadavg()[0]
    found: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    if sites.wan.kind == "netns":
        for index in range(2):
            await give_device_an_address(sites, index)
        for name in GLOO:
            await attempt(name, lambda name=name: bench.gloo(name), found, notes)
    else:
        notes["gloo"] = "needs network namespaces: sites with addresses of their own"
    await attempt("bare_asyncio", bench.bare, found, notes)
    for count in flows:
        await attempt(f"sockets_{count}", lambda count=count: bench.sockets(count), found, notes)
        if shutil.which("iperf3") and sites.wan.kind == "netns":
            await attempt(f"iperf3_{count}", lambda count=count: bench.iperf3(count), found, notes)
    own = await measure_link(sites, options)
    return {
        "mbit_s": {"geotrain": own["mbit_s"], **found},
        "geotrain_over": {n: round(own["mbit_s"] / v, 3) for n, v in found.items() if v},
        "bulk_lanes": own["lanes"] - 1,
        "lane_over_flow": lane_over_flow(own, found),
        "notes": notes if shutil.which("iperf3") else {**notes, "iperf3": "not installed"},
        "congestion_sites": sites.wan.congestion,
        "geotrain": own,
        "load": load,
    }


def lane_over_flow(own: dict[str, Any], found: dict[str, float | None]) -> float | None:
    """None where no single flow was measured; the link's other connection carries control."""
    flow = max((found.get(name) or 0.0 for name in ("sockets_1", "iperf3_1")), default=0.0)
    return round(own["mbit_s"] / (own["lanes"] - 1) / flow, 3) if flow else None


async def attempt(
    name: str, run: Any, found: dict[str, float | None], notes: dict[str, str]
) -> None:
    """One peer; what hangs or fails is told, and the others are measured all the same."""
    print(f"  {name}", file=sys.stderr, flush=True)
    try:
        found[name] = round(await asyncio.to_thread(run) * 8e-6, 2)
    except (subprocess.TimeoutExpired, ValueError, IndexError, OSError) as error:
        found[name], notes[name] = None, f"none: {type(error).__name__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--jitter-ms", type=float, default=0.0)
    parser.add_argument("--congestion", choices=("auto", "cubic", "bbr"), default="auto")
    parser.add_argument("--emulator", choices=("auto", "netns", "relay"), default="auto")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--message-mib", type=float, default=1.0)
    parser.add_argument("--lanes", default="auto", metavar="auto|N", help="of geotrain, for bulk")
    parser.add_argument("--flows", default="1,8", help="of plain sockets and iperf3")
    parser.add_argument("--tls", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role is not None:
        play(*given.role)
        return
    options = LinkBench(
        rtt_s=given.rtt_ms / 1e3,
        mbit=given.mbit or None,
        loss=given.loss,
        jitter_s=given.jitter_ms / 1e3,
        congestion=None if given.congestion == "auto" else given.congestion,
        emulator=given.emulator,
        lanes=None if given.lanes == "auto" else int(given.lanes),
        seconds=given.seconds,
        message_bytes=int(given.message_mib * MIB),
        tls=given.tls,
    )
    flows = [int(text) for text in given.flows.split(",")]
    result = asyncio.run(in_lab(options, lambda sites: measure(sites, options, flows)))
    print(json.dumps(result))


def play(role: str, *arguments: str) -> None:
    match role:
        case "gloo":
            rank, store, seconds, warm_up_s, mib, window = arguments
            times = float(seconds), float(warm_up_s)
            gloo(int(rank), store, *times, mib=int(mib), window=int(window))
        case "bare-receive":
            host, seconds, warm_up_s = arguments
            asyncio.run(bare_receive(host, float(seconds), float(warm_up_s)))
        case "bare-send":
            host, port = arguments
            asyncio.run(bare_send(host, int(port)))


if __name__ == "__main__":
    main()
