"""Does memory grow? Two daemons and two ranks train a small model for thousands of steps.

    python tests/benchmarks/soak.py [--steps 2000] [--from-step 500] [--codec planes]

Prints one JSON object with the resident MiB of each process at --from-step and at the end, and how
much it grew; exit status 1 where one grew by --limit-mib or more.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from geotrain.lab.processes import tethered

REGIONS = ("virginia", "frankfurt")
WIDTH = 128
BATCH = 16
CLASSES = 10
START_LIMIT_S = 60.0
STOP_LIMIT_S = 15.0
MIB = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def train(steps: int) -> None:
    """One region's rank: prints the number of each step it has done."""
    import torch

    import geotrain

    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(3)]
    region = geotrain.attach()
    segment = region.segment(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, CLASSES)))
    region.init_weights(segment)
    optimizer = torch.optim.AdamW(segment.parameters(), lr=1e-3)
    pipeline = region.pipeline(segment, optimizer, loss_fn=torch.nn.functional.cross_entropy)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            inputs = torch.randn(BATCH, WIDTH, generator=generator)
            yield inputs, torch.randint(CLASSES, (BATCH,), generator=generator)

    for result in pipeline.fit(batches() if region.reads_data else None, steps=steps):
        print(result.step, flush=True)


def site_toml(folder: Path, index: int, *, codec: str, dial: str | None) -> Path:
    """Writes one region's config; it dials the next region at the address `dial`."""
    other = REGIONS[1 - index]
    url = f'url = "http://{dial}"' if dial is not None else ""
    file = folder / f"{REGIONS[index]}.toml"
    file.write_text(
        f"""
version = 1
[run]
id = "soak"
global_batch = {BATCH}
plan = {{ microbatches = 4 }}
compression = {{ activations = "{codec}", gradients = "{codec}" }}
regions = [
    {{ name = "{REGIONS[0]}", layers = "0:2" }},
    {{ name = "{REGIONS[1]}", layers = "2:4" }},
]
[site]
name = "{REGIONS[index]}"
listen = "127.0.0.1:0"
status = "127.0.0.1:0"
arena_mib = 8
socket = "{folder / REGIONS[index]}.sock"
[site.peers.{other}]
{url}
"""
    )
    return file


class Line:
    """Both daemons and both ranks; ends them when it is left."""

    def __init__(self, folder: Path, steps: int, codec: str) -> None:
        self._stack = ExitStack()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        dial = None
        # The last region first, so that the one before it knows the port.
        for index in reversed(range(len(REGIONS))):
            name = REGIONS[index]
            site = site_toml(folder, index, codec=codec, dial=dial)
            daemon = self._start(f"daemon {name}", ["-m", "geotrain", "daemon"], site)
            dial = self._listen_address(daemon, Path(f"{folder / name}.sock.json"))
        for name in REGIONS:
            train_argv = [__file__, "--train", "--steps", str(steps)]
            self._start(f"rank {name}", train_argv, folder / f"{name}.toml")

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def resident_bytes(self) -> dict[str, int]:
        """Of every process, now."""
        return {
            name: int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * PAGE_BYTES
            for name, process in self.processes.items()
        }

    def _start(self, name: str, argv: list[str], site: Path) -> subprocess.Popen[str]:
        command = tethered([sys.executable, *argv], parent_pid=os.getpid())
        environment = {**os.environ, "GEOTRAIN_CONFIG": str(site), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.processes[name] = process
        self._stack.callback(_stop, process)
        return process

    def _listen_address(self, daemon: subprocess.Popen[str], note: Path) -> str:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and daemon.poll() is None:
            if note.exists():
                return str(json.loads(note.read_text())["listen"])
            time.sleep(0.05)  # the file is all that tells; the deadline is above
        raise SystemExit("a daemon did not start")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def measure(*, steps: int, from_step: int, codec: str) -> dict[str, dict[str, float]]:
    """Resident MiB of each process at both steps, and the difference."""
    with tempfile.TemporaryDirectory() as folder, Line(Path(folder), steps + 1, codec) as line:
        seen = {}
        watched = line.processes[f"rank {REGIONS[0]}"].stdout
        drained = line.processes[f"rank {REGIONS[1]}"].stdout
        assert watched is not None
        assert drained is not None
        for text in watched:
            drained.readline()  # as many lines as here, or its pipe would fill up
            # One step more runs than is measured, so that every process is there at the last.
            if int(text) in (from_step, steps):
                seen[int(text)] = line.resident_bytes()
    if set(seen) != {from_step, steps}:
        raise SystemExit(f"training ended before step {steps}")
    return {
        name: {
            "from_mib": round(before / MIB, 2),
            "to_mib": round(seen[steps][name] / MIB, 2),
            "grown_mib": round((seen[steps][name] - before) / MIB, 2),
        }
        for name, before in seen[from_step].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--from-step", type=int, default=500)
    parser.add_argument("--limit-mib", type=float, default=4.0)
    parser.add_argument("--codec", choices=("none", "planes"), default="planes")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.steps)
        return 0
    if not 0 < options.from_step < options.steps:
        parser.error("--from-step must lie between 0 and --steps")
    started = time.monotonic()
    resident = measure(steps=options.steps, from_step=options.from_step, codec=options.codec)
    print(
        json.dumps(
            {
                "steps": options.steps,
                "from_step": options.from_step,
                "codec": options.codec,
                "wall_s": round(time.monotonic() - started, 1),
                "resident": resident,
            }
        )
    )
    return int(any(entry["grown_mib"] >= options.limit_mib for entry in resident.values()))


if __name__ == "__main__":
    sys.exit(main())
