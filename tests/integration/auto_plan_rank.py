"""A training run whose plan follows what it measures: what each region runs, and the test as well.

GEOTRAIN_CONFIG=site.toml python auto_plan_rank.py REGION OUT_FOLDER
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import geotrain

WIDTH = 8
GLOBAL_BATCH = 64
STEPS = 8
OVERHEAD_S = 0.01


class Slow(nn.Linear):
    """A layer that takes longer for being called than for its samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(OVERHEAD_S)
        return super().forward(x).tanh()


def model() -> nn.Sequential:
    return nn.Sequential(*(Slow(WIDTH, WIDTH) for _ in range(4)))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(5)
    while True:
        x = torch.randn(GLOBAL_BATCH, WIDTH, generator=rng)
        yield x, x.roll(1, dims=1)


def train(region: geotrain.Region) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The parameters at the end, and the count of microbatches of each step."""
    segment = region.segment(model)
    region.init_weights(segment)
    pipeline = region.pipeline(
        segment,
        torch.optim.SGD(segment.parameters(), lr=0.1),
        loss_fn=nn.functional.mse_loss,
    )
    counts = []
    for result in pipeline.fit(batches() if region.reads_data else None, steps=STEPS):
        counts.append(result.num_microbatches)
    return dict(segment.state_dict()), counts


def main() -> None:
    name, folder = sys.argv[1:]
    parameters, counts = train(geotrain.attach())
    torch.save({"parameters": parameters, "counts": counts}, Path(folder) / f"{name}.pt")


if __name__ == "__main__":
    main()
