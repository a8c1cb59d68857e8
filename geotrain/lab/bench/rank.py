"""One region's training process of `geotrain bench step`, through the public API alone."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import geotrain
from geotrain.lab.bench.options import Work, times_path
from geotrain.lab.bench.stage import SleepModel, make_batch
from geotrain.whole_file import write_whole


def main() -> None:
    work = Work.from_json(sys.argv[1])
    region = geotrain.attach()
    segment = region.segment(lambda: SleepModel.of(work), split=_own_stage)
    assert isinstance(segment, SleepModel)
    region.init_weights(segment)
    optimizer = torch.optim.SGD(segment.parameters(), lr=1e-3)
    pipeline = region.pipeline(segment, optimizer, loss_fn=segment.loss)
    batch = make_batch(work) if region.reads_data else None
    if region.is_main:
        print(json.dumps({"ready": True}), flush=True)
    taken = []
    for _ in range(work.steps):
        result = pipeline.step(batch)
        if region.is_main:
            print(json.dumps(_line(result)), flush=True)
        taken.append(_means_s(result))
    folder = Path(os.environ["GEOTRAIN_CONFIG"]).parent
    # At once: one that runs out of time is ended wherever it is.
    write_whole(times_path(folder, region.name), json.dumps(taken))


def _own_stage(model: nn.Module, region: geotrain.Region) -> nn.Module:
    assert isinstance(model, SleepModel)
    return model.only(region.index)


def _line(result: geotrain.StepResult) -> dict[str, object]:
    names = ("step", "step_s", "num_microbatches", "windows", "attribution_s")
    # All processes of a machine share this clock.
    return {name: getattr(result, name) for name in names} | {"ended_s": time.monotonic()}


def _means_s(result: geotrain.StepResult) -> dict[str, float]:
    """What forwards and backwards of a step took, copies into and out of the arena included."""
    return {
        name: _mean([run.end_s - run.begin_s for run in result.trace if run.kind == kind])
        for name, kind in (("forward_s", "F"), ("backward_s", "B"))
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
