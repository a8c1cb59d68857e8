"""A training run in which something is off for a while: what each region runs, a line a step.

GEOTRAIN_CONFIG=site.toml python verdicts_rank.py REGION

Sequences differ 8-fold in length, from step to step. A layer takes its time by a number of passes
over its tokens; from step SLOW_FROM on, before SLOW_UNTIL, those of the last region make one pass
more.
"""

import json
import sys
import time
from collections.abc import Iterator
from random import Random

import torch
from torch import nn

import geotrain

WIDTH = 8
GLOBAL_BATCH = 8
STEPS = 48
SLOW_FROM, SLOW_UNTIL = 14, 26
PASSES = 2
PASS_S_PER_TOKEN = 100e-6


class Layer(nn.Linear):
    """Takes longer the more tokens it is given, and the more passes it makes."""

    passes = PASSES

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0] * x.shape[1]
        for _ in range(self.passes):
            time.sleep(tokens * PASS_S_PER_TOKEN)
        return super().forward(x).tanh()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng, lengths = torch.Generator().manual_seed(5), Random(7)
    while True:
        x = torch.randn(GLOBAL_BATCH, lengths.choice([8, 16, 32, 64]), WIDTH, generator=rng)
        yield x, x.roll(1, dims=2)


def main() -> None:
    region = geotrain.attach()
    segment = region.segment(lambda: nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(4))))
    region.init_weights(segment)
    pipeline = region.pipeline(
        segment, torch.optim.SGD(segment.parameters(), lr=0.1), loss_fn=nn.functional.mse_loss
    )
    is_last = region.index == region.num_regions - 1
    for result in pipeline.fit(batches() if region.reads_data else None, steps=STEPS):
        verdicts = [verdict.to_record() for verdict in result.verdicts]
        line = {"step": result.step, "step_s": result.step_s, "verdicts": verdicts}
        print(json.dumps(line | {"attribution_s": dict(result.attribution_s)}), flush=True)
        is_slow = is_last and SLOW_FROM <= result.step + 1 < SLOW_UNTIL
        Layer.passes = PASSES + 1 if is_slow else PASSES


if __name__ == "__main__":
    assert sys.argv[1:]
    main()
