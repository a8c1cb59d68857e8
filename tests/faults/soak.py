"""Random faults for an hour: training goes on, computes what one process does, and nothing grows.

    python -m tests.faults.soak [--minutes 60] [--seed 0]      Linux; `make soak`

Real daemons and ranks, a relay between them. In the first half daemons are killed as well; in the
second, every process must keep its memory and its descriptors. Prints one JSON object; exit status
1 where parameters differ, memory grew by --limit-mib or more, or a descriptor was leaked.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.faults.line import BASE, RelayNet
from tests.integration.harness import Process, Regions, RunSpec

SCRIPT = Path(__file__).with_name("soak_rank.py")
SPEC = RunSpec(
    microbatches=3, codec="planes", arena_mib=1, silent_s=2.0, wait_s=120.0, keeps_ports=True
)
PROGRESS_LIMIT_S = 180.0
END_LIMIT_S = 120.0
MIB = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLES = 8
"""At each end of the second half; of memory their median counts."""


class Soak:
    """One run: the regions, the link between them, and what is drawn from the seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = Random(seed)
        self.net = RelayNet(seed=seed)
        self.regions = Regions(folder, SPEC)
        self.samples: dict[str, list[tuple[int, int]]] = {}
        """Of each process, at rest after each fault: resident bytes, open descriptors."""

    def start(self) -> None:
        for name in SPEC.names:
            self.regions.start_rank(name, SCRIPT, name, str(self.regions.folder))
        self.regions.start_daemons(urls={"r1": self.net.address})
        self.net.aim(self.listen_port)

    @property
    def listen_port(self) -> int:
        """Of r1, which is dialled."""
        return int(self.regions.ports["r1"]["listen"].rpartition(":")[2])

    def step(self) -> int:
        """The newest step that all ranks have told of."""
        return min(self._step_of(rank) for rank in self.regions.ranks.values())

    def progress(self) -> None:
        """Wait until training has gone on."""
        goal, deadline = self.step() + 20, time.monotonic() + PROGRESS_LIMIT_S
        while self.step() < goal:
            for process in (*self.regions.daemons.values(), *self.regions.ranks.values()):
                if process.popen.poll() is not None:
                    raise SystemExit(f"{process.name} ended:\n{self.regions.all_tails()}")
            if time.monotonic() > deadline:
                raise SystemExit(f"no step for too long:\n{self.regions.all_tails()}")
            time.sleep(0.05)

    def sample(self) -> None:
        for process in (*self.regions.daemons.values(), *self.regions.ranks.values()):
            proc = Path(f"/proc/{process.pid}")
            resident = int((proc / "statm").read_text().split()[1]) * PAGE_BYTES
            count = len(list((proc / "fd").iterdir()))
            self.samples.setdefault(process.name, []).append((resident, count))

    # ---- faults, each over when its method returns

    def reset_a_connection(self) -> None:
        self.net.reset(all_lanes=False)

    def reset_all_connections(self) -> None:
        self.net.reset(all_lanes=True)

    def cut(self) -> None:
        self._while(self._lasting(0.2, 4 * SPEC.silent_s), cut=True)

    def cut_one_way(self) -> None:
        self._while(
            self._lasting(0.2, 4 * SPEC.silent_s), forward=self.rng.random() < 0.5, cut=True
        )

    def jumping_delay(self) -> None:
        for _ in range(3):
            self._while(1.0, delay_s=self.rng.uniform(0.0, 0.15), jitter_s=0.02)

    def narrow_link(self) -> None:
        self._while(self._lasting(1.0, 8.0), rate_bytes_per_s=self.rng.uniform(1e5, 2e6))

    def forgetful_nat(self) -> None:
        self._while(self._lasting(1.0, 8.0), idle_drop_s=self.rng.uniform(0.05, 0.5))

    def stop_a_daemon(self) -> None:
        pid = int(self.regions.ports[self.rng.choice(SPEC.names)]["pid"])
        self._stop(pid, self._lasting(0.5, 3 * SPEC.silent_s))

    def stop_a_rank(self) -> None:
        rank = self.regions.ranks[self.rng.choice(SPEC.names)]
        self._stop(rank.pid, self._lasting(0.5, 3 * SPEC.silent_s))

    def garbage(self) -> None:
        with self.net.connect(self.listen_port) as connection:
            connection.sendall(self.rng.randbytes(self.rng.randint(1, 5_000)))
            time.sleep(0.2)

    def kill_daemons(self) -> None:
        killed = self.rng.choice([["r0"], ["r1"], ["r0", "r1"]])
        for name in killed:
            self.regions.kill_daemon(name)
        for name in self.rng.sample(killed, len(killed)):
            self.regions.start_daemon(name)

    @property
    def faults(self) -> list[Callable[[], None]]:
        return [
            self.reset_a_connection,
            self.reset_all_connections,
            self.cut,
            self.cut_one_way,
            self.jumping_delay,
            self.narrow_link,
            self.forgetful_nat,
            self.stop_a_daemon,
            self.stop_a_rank,
            self.garbage,
        ]

    # ---- within

    def _while(self, length_s: float, *, forward: bool | None = None, **changes: Any) -> None:
        """The link is like this for so long: nothing but time tells the end of it."""
        self.net.set(forward=forward, **changes)
        try:
            time.sleep(length_s)
        finally:
            before = {name: getattr(BASE, name) for name in changes}
            self.net.set(**before)

    def _lasting(self, least_s: float, most_s: float) -> float:
        return least_s * (most_s / least_s) ** self.rng.random()

    @staticmethod
    def _stop(pid: int, length_s: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(length_s)
        finally:
            os.kill(pid, signal.SIGCONT)

    @staticmethod
    def _step_of(rank: Process) -> int:
        steps = [int(line.split()[1]) for line in rank.lines() if line.startswith("step ")]
        return steps[-1] if steps else 0


def parameters(folder: Path, names: list[str]) -> tuple[int, dict[str, torch.Tensor]]:
    """The number of steps, and all parameters of the run."""
    found = [torch.load(folder / f"{name}.pt", weights_only=True) for name in names]
    [steps] = {each["steps"] for each in found}
    return steps, {name: value for each in found for name, value in each["parameters"].items()}


def grown(samples: list[tuple[int, int]]) -> dict[str, float]:
    """From the first samples to the last; a descriptor was leaked if it is in all of the last."""
    first, last = samples[:SAMPLES], samples[-SAMPLES:]
    before, after = (statistics.median(size for size, _ in part) for part in (first, last))
    return {
        "from_mib": round(before / MIB, 2),
        "grown_mib": round((after - before) / MIB, 2),
        "descriptors_most_at_first": max(count for _, count in first),
        "descriptors_least_at_last": min(count for _, count in last),
    }


def soak(*, minutes: float, seed: int) -> dict[str, Any]:
    started = time.monotonic()
    half, end = started + minutes * 30, started + minutes * 60
    met: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = Soak(folder / "two", seed)
        try:
            with run.regions:
                run.start()
                run.progress()
                while time.monotonic() < end:
                    if time.monotonic() < half:
                        fault = run.rng.choice([*run.faults, run.kill_daemons])
                    else:
                        fault = run.rng.choice(run.faults)
                    print(f"{time.monotonic() - started:6.0f} s {fault.__name__}", file=sys.stderr)
                    fault()
                    met[fault.__name__] += 1
                    run.progress()
                    if time.monotonic() >= half:
                        run.sample()
                (run.regions.folder / "stop").touch()
                run.regions.expect_success(deadline=time.monotonic() + END_LIMIT_S)
        finally:
            run.net.close()
        steps, found = parameters(folder / "two", SPEC.names)
        print(f"{steps} steps; now the same in one process", file=sys.stderr)
        with Regions(folder / "one", RunSpec(regions=1)) as alone:
            alone.start_rank("r0", SCRIPT, "r0", str(alone.folder), str(steps))
            alone.expect_success(deadline=time.monotonic() + minutes * 60 + END_LIMIT_S)
        _, expected = parameters(folder / "one", ["r0"])
    return {
        "seed": seed,
        "minutes": minutes,
        "steps": steps,
        "faults": dict(met),
        "same_parameters": found.keys() == expected.keys()
        and all(torch.equal(value, found[name]) for name, value in expected.items()),
        "second_half": {name: grown(samples) for name, samples in run.samples.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-mib", type=float, default=4.0)
    options = parser.parse_args()
    result = soak(minutes=options.minutes, seed=options.seed)
    print(json.dumps(result, indent=2))
    is_flat = all(
        each["grown_mib"] < options.limit_mib
        and each["descriptors_least_at_last"] <= each["descriptors_most_at_first"]
        for each in result["second_half"].values()
    )
    return int(not (is_flat and result["same_parameters"]))


if __name__ == "__main__":
    sys.exit(main())
