"""One region's training process of `geotrain bench step`, through the public API alone."""

import json
import sys

import torch
from torch import nn

import geotrain
from geotrain.lab.bench.options import Work
from geotrain.lab.bench.stage import SleepModel, make_batch, mean_output


def main() -> None:
    work = Work.from_json(sys.argv[1])
    region = geotrain.attach()
    segment = region.segment(lambda: SleepModel(work.forward_s, work.backward_s), split=_own_stage)
    region.init_weights(segment)
    optimizer = torch.optim.SGD(segment.parameters(), lr=1e-3)
    pipeline = region.pipeline(segment, optimizer, loss_fn=mean_output)
    batch = make_batch(work.num_microbatches, work.boundary_bytes) if region.reads_data else None
    if region.is_main:
        print(json.dumps({"ready": True}), flush=True)
    for _ in range(work.steps):
        result = pipeline.step(batch)
        if region.is_main:
            print(json.dumps(_line(result)), flush=True)


def _own_stage(model: nn.Module, region: geotrain.Region) -> nn.Module:
    assert isinstance(model, SleepModel)
    return model.only(region.index)


def _line(result: geotrain.StepResult) -> dict[str, object]:
    names = ("step_s", "num_microbatches", "windows", "attribution_s")
    return {name: getattr(result, name) for name in names}


if __name__ == "__main__":
    main()
