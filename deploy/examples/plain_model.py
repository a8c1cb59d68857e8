"""The loop of the API, with a plain nn.Sequential.

Shows everything that a training script needs: attach, segment, weights, optimizer and scheduler,
pipeline, fit, evaluate, save and resume. The model predicts the next byte of Python's own standard
library from the 16 bytes before it; it is small, so that the loop is what one reads.

Alone, in this process and without any daemon:

    python deploy/examples/plain_model.py --steps 20

Over two regions: the same line in each, beside its daemon, with the region's own config. An
nn.Sequential needs no `split`; `layers` counts its modules, here 9: "0:5" and "5:9".

    geotrain run --config site.toml -- python deploy/examples/plain_model.py --steps 20
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import geotrain

CONTEXT = 16
VOCABULARY = 256
BATCH = 32
"""At most run.global_batch of the config."""


def build_model(width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width),
        nn.Flatten(),
        nn.Linear(CONTEXT * width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, VOCABULARY),
    )


def library_text(limit_bytes: int = 1 << 20) -> torch.Tensor:
    """The source of Python's standard library as bytes: text that every machine has."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def batches(text: torch.Tensor, *, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, targets): CONTEXT bytes a sample, and the byte after them."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, text.numel() - CONTEXT, (BATCH, 1), generator=generator)
        window = text[starts + torch.arange(CONTEXT + 1)].long()
        yield window[:, :-1], window[:, -1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--checkpoints", type=Path, help="save here, and resume from here")
    options = parser.parse_args()

    region = geotrain.attach()  # reads GEOTRAIN_CONFIG; without it: one process, no daemon
    segment = region.segment(build_model)
    region.init_weights(segment)
    optimizer = torch.optim.AdamW(segment.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    pipeline = region.pipeline(
        segment,
        optimizer,
        loss_fn=nn.CrossEntropyLoss(),
        loss_reduction="mean",
        scheduler=scheduler,
        max_grad_norm=1.0,
    )

    loader = held_out = None
    if region.reads_data:  # only the first region needs the data
        text = library_text()
        cut = text.numel() * 9 // 10
        loader, held_out = batches(text[:cut], seed=0), text[cut:]
    if options.checkpoints is not None:
        pipeline.resume(options.checkpoints, loader=loader)

    for result in pipeline.fit(loader, steps=options.steps):
        if region.is_main:  # true once in the whole run
            rate = result.metrics()["tokens_per_s"]
            print(f"step {result.step} loss {result.loss:.4f} targets/s {rate:.0f}", flush=True)
        if result.step % options.every == 0 or result.step == options.steps:
            # Every region makes the call, and gets the same report.
            data = batches(held_out, seed=1) if held_out is not None else None
            report = pipeline.evaluate(data, max_batches=4)
            if region.is_main:
                print(f"step {result.step} held-out loss {report.loss:.4f}", flush=True)
            if options.checkpoints is not None:
                pipeline.save(options.checkpoints)


if __name__ == "__main__":
    main()
