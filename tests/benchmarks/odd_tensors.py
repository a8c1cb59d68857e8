"""Tensors of unusual sizes from region to region: python -m tests.benchmarks.odd_tensors

Two regions over loopback, as users run them, evaluate batches whose boundary is one tensor of
3 GiB through arenas of 256 MiB; tensors without elements; and 100,000 tensors of 100 bytes. Every
tensor's hash travels with it and is compared at the other end. Prints one JSON object: seconds,
what arrived wrong, and the most memory that each daemon had of its own, its arena not included.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash
from torch import nn

import geotrain
from tests.daemon.daemons import daemons

MIB = 1 << 20
ARENA_MIB = 256
LIMIT_S = 900.0
POLL_S = 0.05
CASES: dict[str, tuple[int, int, int]] = {
    "one of 3 GiB": (1, 1, 3 << 30),
    "1,000 without elements": (1, 1_000, 0),
    "100,000 of 100 bytes": (25, 4_000, 100),
}
"""How many batches, tensors in each, and the bytes of each tensor."""


class Passes(nn.Module):
    """A layer that hands on what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def hash_of(x: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(x.contiguous().numpy())) >> 1


def make_batch(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes_NS, hash_N), each sample unlike all others, and no two MiB of one alike."""
    generator = torch.Generator().manual_seed(count)
    block = torch.randint(0, 256, (min(count * size, MIB),), dtype=torch.uint8, generator=generator)
    data = torch.empty(count * size, dtype=torch.uint8)
    for number, start in enumerate(range(0, count * size, MIB)):
        piece = data[start : start + MIB]
        piece.copy_(block[: len(piece)])
        piece[:8] = torch.tensor(list(number.to_bytes(8, "little")), dtype=torch.uint8)[
            : len(piece)
        ]
    samples = data.reshape(count, size)
    return samples, torch.tensor([hash_of(sample) for sample in samples], dtype=torch.int64)


def differs(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss: how many samples are not what was sent."""
    found = [hash_of(sample) for sample in output]
    return torch.tensor(float(sum(a != b for a, b in zip(found, targets.tolist(), strict=True))))


def rank_main(config: str, case: str) -> None:
    region = geotrain.attach(config)
    segment = region.segment(lambda: nn.Sequential(Passes(), Passes()))
    pipeline = region.pipeline(segment, None, loss_fn=differs, loss_reduction="sum")
    num_batches, count, size = CASES[case]
    batch = make_batch(count, size) if region.reads_data else None
    began = time.perf_counter()
    report = pipeline.evaluate([batch] * num_batches if batch is not None else None)
    took_s = time.perf_counter() - began
    region.close()
    wrong = round(report.loss * report.num_tokens)
    print(json.dumps({"took_s": took_s, "tensors": int(report.num_tokens), "wrong": wrong}))


class Watch:
    """The most anonymous memory that each process had: of its own, and of no file or arena."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.most_mib = dict.fromkeys(pids, 0.0)
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            for name, process in self._processes.items():
                # Not `uss`, which counts the arena as soon as the rank's mapping of it is gone.
                info = process.memory_info()
                own_mib = (info.rss - info.shared) / MIB
                self.most_mib[name] = max(self.most_mib[name], round(own_mib, 1))


def measure(folder: Path, case: str) -> dict[str, Any]:
    num_batches, count, _ = CASES[case]
    run = f"[run.plan]\nmicrobatches = {count}\n"
    with daemons(folder, 2, site=f"arena_mib = {ARENA_MIB}", run=run, batch=count) as running:
        pids = {name: process.pid for name, process in running.processes.items()}
        with Watch(pids) as watch:
            ranks = [spawn(running.config_path(name), case) for name in running.names]
            results = [finish(rank) for rank in ranks]
    assert results[0]["tensors"] == num_batches * count, results
    return {
        "seconds": round(results[1]["took_s"], 1),
        "tensors": num_batches * count,
        "wrong": results[0]["wrong"],
        "daemons_own_mib": watch.most_mib,
    }


def spawn(config: Path, case: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.benchmarks.odd_tensors"]
    argv += ["--rank", str(config), "--case", case]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, "a process of the benchmark failed"
    return json.loads(output.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="this one only")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.case)
        return 0
    results = {}
    for case in [options.case] if options.case else CASES:
        with tempfile.TemporaryDirectory() as folder:
            results[case] = measure(Path(folder), case)
    ok = all(result["wrong"] == 0 for result in results.values())
    print(json.dumps({"benchmark": "odd_tensors", "arena_mib": ARENA_MIB, **results, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
