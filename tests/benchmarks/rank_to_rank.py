"""How fast a tensor goes from rank to rank: python -m tests.benchmarks.rank_to_rank [--both-ways]

Two ranks and their two daemons, four processes, over loopback. One way: 32 MiB messages, copied
into the arena and out of it; beside it, in turn, two bare asyncio processes (1 MiB writes into a
BufferedProtocol), so that the share does not depend on the machine; and the CPU seconds per GB of
each process, which hardly depend on what else the machine does. Both ways: 64 MiB messages of
floats whose high byte planes are coded; what counts is each daemon's loop lag.
Prints one JSON object; exit status 1 where a goal is missed.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from geotrain.transport.attachment import Attachment
from tests.daemon.daemons import Daemons, attach, daemons
from tests.transport.local_line import open_views

MIB = 1 << 20
GOAL_SHARE = 0.5
GOAL_LAG_MS = 50.0
TIMEOUT_S = 120.0
FORWARD, BACKWARD = 0, 1
NUM_WARM_UP = 4


# A rank: one process, which prints its result as JSON.


class Rank:
    """Sends and takes messages of one size, all through one loop that never blocks on either."""

    def __init__(self, attachment: Attachment, *, sends: int, receives: int, planes: bool) -> None:
        self._attachment = attachment
        self._out = attachment.out(sends)
        self._incoming = attachment.incoming(receives)
        self._planes = planes

    def run(self, *, num_to_send: int, num_to_take: int, payload_bytes: int) -> tuple[float, float]:
        """Returns the seconds from the end of the warm-up to the last message taken, and the CPU
        seconds of the whole."""
        source = make_payload(payload_bytes)
        target = np.empty(payload_bytes, np.uint8)
        num_sent = num_taken = 0
        started, began_cpu_s = time.perf_counter(), time.process_time()
        while num_sent < num_to_send or num_taken < num_to_take:
            assert self._attachment.wait(
                lambda: (
                    self._incoming.pending() > 0
                    or (num_sent < num_to_send and self._out.fits(payload_bytes))  # noqa: B023
                ),
                timeout_s=TIMEOUT_S,
            ), "neither a message nor a slot"
            if num_sent < num_to_send and self._out.fits(payload_bytes):
                self._send(source, num_sent)
                num_sent += 1
            received = self._incoming.take()
            if received is not None:
                np.copyto(target, np.frombuffer(received.payload, np.uint8))
                received.release()
                num_taken += 1
                if num_taken == NUM_WARM_UP:
                    started = time.perf_counter()
        took_s = time.perf_counter() - started
        out = self._out
        assert self._attachment.wait(lambda: out.unacknowledged == 0, timeout_s=TIMEOUT_S)
        cpu_s = time.process_time() - began_cpu_s
        assert num_to_take == 0 or np.array_equal(source, target), "not what was sent"
        return took_s, cpu_s

    def _send(self, source: np.ndarray, index: int) -> None:
        start, slot = self._out.reserve(source.nbytes)
        np.copyto(np.frombuffer(slot, np.uint8), source)
        quarter = source.nbytes // 4
        self._out.send(
            kind="forward",
            step=0,
            microbatch=index,
            start=start,
            payload_bytes=source.nbytes,
            hints=((3 * quarter, quarter),) if self._planes else (),
        )


def make_payload(payload_bytes: int) -> np.ndarray:
    """Normal floats as byte planes: the last quarter is sign and exponent, and can be coded."""
    floats = np.random.default_rng(1).standard_normal(payload_bytes // 4, np.float32)
    return np.ascontiguousarray(floats.view(np.uint8).reshape(-1, 4).T).reshape(-1)


def rank_main(config: str, payload_bytes: int, count: int, both_ways: bool) -> None:
    attachment = attach(Path(config))
    open_views(attachment)
    is_first = attachment.region_index == 0
    sends, receives = (FORWARD, BACKWARD) if is_first else (BACKWARD, FORWARD)
    rank = Rank(attachment, sends=sends, receives=receives, planes=both_ways)
    took_s, cpu_s = rank.run(
        num_to_send=count if is_first or both_ways else 0,
        num_to_take=count if not is_first or both_ways else 0,
        payload_bytes=payload_bytes,
    )
    attachment.close()
    num_timed = count - NUM_WARM_UP
    rate = num_timed * payload_bytes / took_s / 1e9
    print(json.dumps({"took_s": took_s, "gb_per_s": rate, "cpu_s": cpu_s}))


# Bare asyncio: the same bytes between two processes.


class Sink(asyncio.BufferedProtocol):
    def __init__(self, total_bytes: int, done: asyncio.Future[float]) -> None:
        self._buffer = memoryview(bytearray(MIB))
        self._left = total_bytes
        self._done = done
        self._started = 0.0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._started = self._started or time.perf_counter()
        self._left -= nbytes
        if self._left <= 0 and not self._done.done():
            self._done.set_result(time.perf_counter() - self._started)


async def bare_receive(total_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[float] = loop.create_future()
    server = await loop.create_server(lambda: Sink(total_bytes, done), "127.0.0.1", 0)
    began_cpu_s = time.process_time()
    print(server.sockets[0].getsockname()[1], flush=True)
    took_s = await asyncio.wait_for(done, TIMEOUT_S)
    cpu_s = time.process_time() - began_cpu_s
    print(json.dumps({"gb_per_s": total_bytes / took_s / 1e9, "cpu_s": cpu_s}), flush=True)


async def bare_send(port: int, total_bytes: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    data = memoryview(bytes(MIB))
    began_cpu_s = time.process_time()
    for _ in range(total_bytes // MIB):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()
    print(json.dumps({"cpu_s": time.process_time() - began_cpu_s}), flush=True)


# The whole, put together.


def spawn(*arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.benchmarks.rank_to_rank", *arguments]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, "a process of the benchmark failed"
    return json.loads(output.splitlines()[-1]) if output else None


@dataclass(frozen=True)
class Measured:
    """GB/s as each taking process saw it, and the CPU seconds per GB of each process."""

    gb_per_s: list[float]
    cpu_s_per_gb: dict[str, float]


def measure_bare(total_bytes: int) -> Measured:
    receiver = spawn("--role", "bare-receive", "--total-bytes", str(total_bytes))
    assert receiver.stdout is not None
    port = receiver.stdout.readline().strip()
    sender = spawn("--role", "bare-send", "--total-bytes", str(total_bytes), "--port", port)
    received, sent = finish(receiver), finish(sender)
    cpu_s = {"bare_sender": sent["cpu_s"], "bare_receiver": received["cpu_s"]}
    return Measured([received["gb_per_s"]], per_gb(cpu_s, total_bytes))


def measure_ranks(running: Daemons, *, mib: int, count: int, both_ways: bool) -> Measured:
    ranks = []
    before = {name: cpu_of_daemon(running, name) for name in running.names}
    for name in running.names:
        arguments = ["--config", str(running.config_path(name)), "--mib", str(mib)]
        arguments += ["--count", str(count)] + (["--both-ways"] if both_ways else [])
        ranks.append(spawn("--role", "rank", *arguments))
    results = dict(zip(running.names, map(finish, ranks), strict=True))
    cpu_s = {f"rank_{name}": result["cpu_s"] for name, result in results.items()}
    for name in running.names:
        cpu_s[f"daemon_{name}"] = cpu_of_daemon(running, name) - before[name]
    rates = [result["gb_per_s"] for result in results.values()]
    total_bytes = count * mib * MIB * (2 if both_ways else 1)
    return Measured(rates if both_ways else rates[1:], per_gb(cpu_s, total_bytes))


def cpu_of_daemon(running: Daemons, name: str) -> float:
    times = psutil.Process(running.processes[name].pid).cpu_times()
    return float(times.user + times.system)


def per_gb(cpu_s: dict[str, float], total_bytes: int) -> dict[str, float]:
    return {name: seconds / (total_bytes / 1e9) for name, seconds in cpu_s.items()}


def medians(rounds: list[Measured]) -> dict[str, float]:
    names = rounds[0].cpu_s_per_gb
    return {
        name: round(statistics.median(one.cpu_s_per_gb[name] for one in rounds), 3)
        for name in names
    }


def one_way(folder: Path, *, mib: int, count: int, rounds: int) -> dict[str, Any]:
    bare_rounds, rank_rounds = [], []
    with daemons(folder, 2, site=f"arena_mib = {8 * mib}") as running:
        for _ in range(rounds):
            bare_rounds.append(measure_bare(count * mib * MIB))
            rank_rounds.append(measure_ranks(running, mib=mib, count=count, both_ways=False))
        lags = {name: running.status(name)["loop_lag_ms"] for name in running.names}
    bare = [rate for one in bare_rounds for rate in one.gb_per_s]
    ranks = [rate for one in rank_rounds for rate in one.gb_per_s]
    share = statistics.median(ranks) / statistics.median(bare)
    ours, theirs = medians(rank_rounds), medians(bare_rounds)
    return {
        "benchmark": "rank_to_rank",
        "message_mib": mib,
        "messages": count,
        "gb_per_s": statistics.median(ranks),
        "bare_asyncio_gb_per_s": statistics.median(bare),
        "share": share,
        "cpu_s_per_gb": {
            **{name: ours[name] for name in sorted(ours)},
            "all": round(sum(ours.values()), 3),
            **theirs,
            "bare_all": round(sum(theirs.values()), 3),
        },
        "rounds": {"gb_per_s": ranks, "bare_asyncio_gb_per_s": bare},
        "loop_lag_ms": lags,
        "goal": f"share >= {GOAL_SHARE}",
        "ok": share >= GOAL_SHARE,
    }


def both_ways(folder: Path, *, mib: int, count: int) -> dict[str, Any]:
    with daemons(folder, 2, site=f"arena_mib = {8 * mib}") as running:
        measured = measure_ranks(running, mib=mib, count=count, both_ways=True)
        statuses = [running.status(name) for name in running.names]
    lags = [status["loop_lag_ms"] for status in statuses]
    sent = sum(link["bytes_sent"] for status in statuses for link in status["links"].values())
    return {
        "benchmark": "both_ways",
        "message_mib": mib,
        "messages_each_way": count,
        "gb_per_s_each_way": measured.gb_per_s,
        "cpu_s_per_gb": {name: round(s, 3) for name, s in sorted(measured.cpu_s_per_gb.items())},
        "wire_share": sent / (2 * count * mib * MIB),
        "loop_lag_ms": dict(zip(running.names, lags, strict=True)),
        "goal": f"p99 < {GOAL_LAG_MS} ms",
        "ok": all(lag["p99"] < GOAL_LAG_MS for lag in lags),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--both-ways", action="store_true", help="64 MiB, coded, loop lag")
    parser.add_argument("--mib", type=int, help="size of a message")
    parser.add_argument("--count", type=int, default=48, help="messages (each way)")
    parser.add_argument("--rounds", type=int, default=3)
    for internal in ("--role", "--config", "--total-bytes", "--port"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args()
    mib = options.mib or (64 if options.both_ways else 32)
    match options.role:
        case "rank":
            rank_main(options.config, mib * MIB, options.count, options.both_ways)
        case "bare-receive":
            asyncio.run(bare_receive(int(options.total_bytes)))
        case "bare-send":
            asyncio.run(bare_send(int(options.port), int(options.total_bytes)))
        case _:
            with tempfile.TemporaryDirectory() as folder:
                if options.both_ways:
                    result = both_ways(Path(folder), mib=mib, count=options.count)
                else:
                    result = one_way(
                        Path(folder), mib=mib, count=options.count, rounds=options.rounds
                    )
            print(json.dumps(result, indent=2))
            return 0 if result["ok"] else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
