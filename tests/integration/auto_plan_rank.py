"""Training runs whose plans change while they go on: what each region runs, and the test as well.

python auto_plan_rank.py REGION OUT_FOLDER KIND=SITE_FILE...

One run after another, each with a config of its own. One of the kind "auto" ends once its count has
changed.
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
OVERHEAD_S = 0.01
CHANGED = "the count has changed"


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


def train(
    region: geotrain.Region, *, steps: int | None = None, until_changed: bool = False
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The parameters at the end, and the count of microbatches of each step.

    Args:
        steps: How many; by default run.steps.
        until_changed: To end it before, when steps have run with another count than the first.
    """
    segment = region.segment(model)
    region.init_weights(segment)
    pipeline = region.pipeline(
        segment,
        torch.optim.SGD(segment.parameters(), lr=0.1),
        loss_fn=nn.functional.mse_loss,
    )
    counts = []
    for result in pipeline.fit(batches() if region.reads_data else None, steps=steps):
        counts.append(result.num_microbatches)
        if until_changed and region.reads_data and counts[-1] != counts[0]:
            pipeline.request_stop(CHANGED)
    return dict(segment.state_dict()), counts


def main() -> None:
    name, folder, *configs = sys.argv[1:]
    for kind, _, config in (text.partition("=") for text in configs):
        region = geotrain.attach(config)
        parameters, counts = train(region, until_changed=kind == "auto")
        region.close()
        torch.save({"parameters": parameters, "counts": counts}, Path(folder, f"{name}.{kind}.pt"))


if __name__ == "__main__":
    main()
