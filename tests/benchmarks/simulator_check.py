"""The simulator against real steps: 20 settings, none of which it was fitted to.

    python tests/benchmarks/simulator_check.py             about 6 minutes
    python tests/benchmarks/simulator_check.py --runs 0,1  two of the five runs, 4 settings each

What the machine adds to a forward and to a backward is taken from one run on a link that is in none
of the settings; everything else is as asked for: times, delay, rate, windows, counts. Told beside
it: the same without what the machine adds. Needs a quiet machine.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from geotrain.control.ideal import Costs  # noqa: E402
from geotrain.control.journal import Entry  # noqa: E402
from geotrain.pipeline.simulate import (  # noqa: E402
    Boundary,
    Direction,
    PipelineModel,
    StageTimes,
    simulate,
)
from tests.benchmarks.step_table import Result, run  # noqa: E402

STEPS = 5
"""Of each setting; the first still has the last one's tensors under way, and is not counted."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run: its link, its stages, and the windows and counts that take turns in it."""

    rtt_ms: float
    mbit: float
    overhead_ms: tuple[float, ...]
    sample_ms: float
    kib_per_sample: float
    global_batch: int
    plans: tuple[tuple[int, tuple[int, ...]], ...]
    """(microbatches, windows)"""

    @property
    def options(self) -> list[str]:
        return [
            *("--regions", str(len(self.overhead_ms)), "--rtt-ms", f"{self.rtt_ms:g}"),
            *("--mbit", f"{self.mbit:g}", "--global-batch", str(self.global_batch)),
            *("--overhead-ms", ",".join(f"{ms:g}" for ms in self.overhead_ms)),
            *("--sample-ms", f"{self.sample_ms:g}", "--microbatches", str(self.plans[0][0])),
            *("--boundary-kib-per-sample", f"{self.kib_per_sample:g}"),
        ]


PROFILE = Setup(
    rtt_ms=50,
    mbit=1000,
    overhead_ms=(20, 20),
    sample_ms=10,
    kib_per_sample=256,
    global_batch=32,
    plans=((16, (5, 1)),),
)
RUNS = (
    Setup(
        rtt_ms=0,
        mbit=1000,
        overhead_ms=(12, 12),
        sample_ms=12,
        kib_per_sample=256,
        global_batch=64,
        plans=((16, (2, 1)), (16, (3, 1)), (32, (3, 1)), (8, (4, 1))),
    ),
    Setup(
        rtt_ms=100,
        mbit=1000,
        overhead_ms=(12, 12),
        sample_ms=12,
        kib_per_sample=256,
        global_batch=64,
        plans=((16, (2, 1)), (16, (4, 1)), (32, (5, 1)), (32, (16, 1))),
    ),
    Setup(
        rtt_ms=300,
        mbit=200,
        overhead_ms=(12, 12),
        sample_ms=12,
        kib_per_sample=128,
        global_batch=64,
        plans=((16, (3, 1)), (16, (9, 1)), (32, (9, 1)), (8, (8, 1))),
    ),
    Setup(
        rtt_ms=60,
        mbit=100,
        overhead_ms=(30, 18),
        sample_ms=9,
        kib_per_sample=128,
        global_batch=64,
        plans=((16, (3, 1)), (16, (6, 2)), (32, (4, 1)), (32, (12, 1))),
    ),
    Setup(
        rtt_ms=80,
        mbit=500,
        overhead_ms=(15, 30, 20),
        sample_ms=12,
        kib_per_sample=128,
        global_batch=48,
        plans=((12, (3, 2, 1)), (12, (7, 4, 1)), (24, (6, 3, 1)), (24, (12, 8, 2))),
    ),
)


def measured(setup: Setup) -> Result:
    """One run of `geotrain bench step` through all plans of the setup."""
    command = [sys.executable, "-m", "geotrain", "bench", "step", "--json", *setup.options]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plans.jsonl"
        count, windows = setup.plans[0]
        lines = [Entry(step=1, num_microbatches=count, windows=windows).to_line()]
        for number, (count, windows) in enumerate(setup.plans):
            step = 2 + number * STEPS
            lines.append(Entry(step=step, num_microbatches=count, windows=windows).to_line())
        file.write_text("".join(lines), encoding="utf-8")
        steps = 1 + STEPS * len(setup.plans)
        return run([*command, "--replay", str(file), "--steps", str(steps)])


def costs_of(setup: Setup, count: int) -> Costs:
    """As asked for."""
    from geotrain.commands.bench import parse
    from geotrain.lab.bench.options import BenchOptions

    options = parse(["step", *setup.options])
    assert isinstance(options, BenchOptions)
    return options.costs_with(count)


def predicted_s(costs: Costs, windows: Sequence[int], added_s: tuple[float, float]) -> float:
    ways = [
        Direction(latency_s=latency_s, transfer_s=transfer_s)
        for latency_s, transfer_s in zip(costs.latency_s, costs.transfer_s, strict=True)
    ]
    stages = zip(costs.forward_s, costs.backward_s, strict=True)
    model = PipelineModel(
        stages=[
            StageTimes(forward_s=[f + added_s[0]], backward_s=[b + added_s[1]]) for f, b in stages
        ],
        boundaries=[Boundary(forward=way, backward=way) for way in ways],
    )
    return simulate(model, num_microbatches=costs.num_microbatches, windows=windows).step_s


def machine_adds_s() -> tuple[float, float]:
    """To a forward and to a backward, by the profile's run."""
    result = measured(PROFILE)
    if "failed" in result or result["measured"] is None:
        raise SystemExit(f"the profile failed: {result.get('failed', 'no times of all regions')}")
    costs = costs_of(PROFILE, PROFILE.plans[0][0])
    found = result["measured"]
    forward_s = statistics.mean(found["forward_s"]) - statistics.mean(costs.forward_s)
    backward_s = statistics.mean(found["backward_s"]) - statistics.mean(costs.backward_s)
    return max(0.0, forward_s), max(0.0, backward_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ",".join(str(number) for number in range(len(RUNS)))
    parser.add_argument("--runs", default=every, help=f"which of the {len(RUNS)} (default all)")
    given = parser.parse_args()
    added_s = machine_adds_s()
    forward_ms, backward_ms = (each * 1e3 for each in added_s)
    print(f"the machine adds {forward_ms:.2f} ms to a forward, {backward_ms:.2f} to a backward\n")
    columns = ("link", "regions", "microbatches, windows", "step", "simulated", "error")
    columns = (*columns, "without what it adds", "load")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    errors, bare_errors = [], []
    for setup in (RUNS[int(number)] for number in given.runs.split(",")):
        result = measured(setup)
        if "failed" in result:
            print(f"| {setup.rtt_ms:g} ms, {setup.mbit:g} Mbit/s | {result['failed']} |")
            continue
        for number, (count, windows) in enumerate(setup.plans):
            first = 1 + number * STEPS
            step_s = statistics.median(result["all_step_s"][first + 1 : first + STEPS])
            costs = costs_of(setup, count)
            with_s = predicted_s(costs, windows, added_s)
            bare_s = predicted_s(costs, windows, (0.0, 0.0))
            errors.append(with_s / step_s - 1)
            bare_errors.append(bare_s / step_s - 1)
            cells = [
                f"{setup.rtt_ms:g} ms, {setup.mbit:g} Mbit/s",
                str(len(setup.overhead_ms)),
                f"{count}, {','.join(map(str, windows))}",
                f"{step_s:.3f}",
                f"{with_s:.3f}",
                f"{errors[-1]:+.1%}",
                f"{bare_errors[-1]:+.1%}",
                f"{result['load']:.1f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    for name, each in (("with", errors), ("without", bare_errors)):
        sizes = [abs(error) for error in each]
        print(f"{name} what it adds: mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
