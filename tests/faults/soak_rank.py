"""What a region runs in `soak.py`: trains until told to stop, or for so many steps.

GEOTRAIN_CONFIG=site.toml python soak_rank.py REGION FOLDER [STEPS]
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import geotrain

WIDTH = 16
WIDE = 1 << 13
"""Features at the boundary: a microbatch of 8 samples has 256 KiB."""
BATCH = 24
ENDLESS = 1_000_000_000
TELL_EVERY = 10


def model() -> nn.Sequential:
    widths = [WIDTH, WIDTH, WIDE, WIDTH, WIDTH]
    layers = (
        nn.Sequential(nn.Linear(*pair), nn.Dropout(0.1), nn.Tanh())
        for pair in itertools.pairwise(widths)
    )
    return nn.Sequential(*layers)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(BATCH, WIDTH, generator=rng), torch.randn(BATCH, WIDTH, generator=rng)


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else ENDLESS
    torch.manual_seed(7)
    region = geotrain.attach()
    segment = region.segment(model)
    region.init_weights(segment)
    optimizer = torch.optim.AdamW(segment.parameters(), lr=1e-3)
    pipeline = region.pipeline(segment, optimizer, loss_fn=nn.functional.mse_loss)
    for result in pipeline.fit(batches() if region.reads_data else None, steps=steps):
        if result.step % TELL_EVERY == 0:
            print(f"step {result.step}", flush=True)
        if region.index == 0 and (folder / "stop").exists():
            pipeline.request_stop("the hour is over")
    state = {"steps": pipeline.step_count, "parameters": dict(segment.state_dict())}
    torch.save(state, folder / f"{name}.pt")
    region.close()


if __name__ == "__main__":
    main()
