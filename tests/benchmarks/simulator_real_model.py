"""The simulator against the demo's real model, from a profile of 20 steps on another link.

    python -m tests.benchmarks.simulator_real_model [--steps 20]

The stages' times are drawn from those of the profile, and what a step takes besides (votes,
optimizer, loader) is what the profile took longer than simulated. The links are relays with the
delay and rate asked for. Prints one JSON object with the error of each setting.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from geotrain.lab.demo import plain
from geotrain.lab.demo import train as demo_train
from geotrain.pipeline.simulate import (
    Boundary,
    Direction,
    PipelineModel,
    StageTimes,
    simulate,
)
from tests.faults.line import RelayNet
from tests.integration.harness import Regions, RunSpec

BATCH, MICROBATCHES, LAYERS = 32, 8, 6
COUNTED_FROM = 4
DRAWS = 20
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    rtt_s: float
    mbit: float
    window: int

    @property
    def direction(self) -> Direction:
        config = plain.ByteConfig()
        size = BATCH // MICROBATCHES * config.context * config.width * 4
        return Direction(latency_s=self.rtt_s / 2, transfer_s=size * 8e-6 / self.mbit)

    def __str__(self) -> str:
        return f"{self.rtt_s * 1e3:g} ms, {self.mbit:g} Mbit/s, window {self.window}"


PROFILE = Setting(rtt_s=0.02, mbit=500, window=4)
SETTINGS = (
    Setting(rtt_s=0.1, mbit=500, window=8),
    Setting(rtt_s=0.3, mbit=200, window=8),
    Setting(rtt_s=0.15, mbit=50, window=3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    step_s: float
    stages: Sequence[StageTimes]


def measure(folder: Path, setting: Setting, steps: int) -> Measured:
    """The demo's own script in two regions, joined by a relay."""
    spec = RunSpec(
        layers=LAYERS,
        microbatches=MICROBATCHES,
        global_batch=BATCH,
        window=[setting.window, 1],
        seed=0,
        arena_mib=64,
    )
    net = RelayNet(seed=0)
    arguments = ["--steps", str(steps), "--batch", str(BATCH), "--json"]
    try:
        net.set(delay_s=setting.rtt_s / 2, rate_bytes_per_s=setting.mbit * 125e3)
        with Regions(folder, spec) as regions:
            for name in spec.names:
                regions.start_rank(name, Path(demo_train.__file__), *arguments)
            regions.start_daemons(urls={"r1": net.address})
            net.aim(int(regions.ports["r1"]["listen"].rpartition(":")[2]))
            regions.expect_success(deadline=time.monotonic() + LIMIT_S)
            lines = [lines_of(rank.output()) for rank in regions.ranks.values()]
    finally:
        net.close()
    counted = [[line for line in each if line["step"] >= COUNTED_FROM] for each in lines]
    return Measured(
        step_s=statistics.median(line["step_s"] for line in counted[0]),
        stages=[
            StageTimes(forward_s=times_of(each, "F"), backward_s=times_of(each, "B"))
            for each in counted
        ],
    )


def lines_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def times_of(lines: Sequence[dict[str, Any]], kind: str) -> list[float]:
    return [end - begin for line in lines for k, _, begin, end in line["trace"] if k == kind]


def simulated_s(stages: Sequence[StageTimes], setting: Setting) -> float:
    way = setting.direction
    model = PipelineModel(stages=stages, boundaries=[Boundary(forward=way, backward=way)])
    windows = [setting.window, 1]
    return statistics.median(
        simulate(model, num_microbatches=MICROBATCHES, windows=windows, rng=Random(seed)).step_s
        for seed in range(DRAWS)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = measure(folder / "profile", PROFILE, given.steps)
        besides_s = profile.step_s - simulated_s(profile.stages, PROFILE)
        rows = []
        for number, setting in enumerate(SETTINGS):
            found = measure(folder / f"{number}", setting, given.steps)
            predicted_s = simulated_s(profile.stages, setting) + besides_s
            rows.append(
                {
                    "link": str(setting),
                    "step_s": round(found.step_s, 3),
                    "predicted_s": round(predicted_s, 3),
                    "error": round(predicted_s / found.step_s - 1, 3),
                }
            )
    result = {
        "benchmark": "simulator_real_model",
        "profile": {"link": str(PROFILE), "step_s": round(profile.step_s, 3)},
        "besides_s": round(besides_s, 3),
        "rows": rows,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
