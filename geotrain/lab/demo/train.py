"""The demo's training script: what a user writes, run once in every region.

GEOTRAIN_CONFIG=site.toml python -m geotrain.lab.demo.train --steps 30
"""

import argparse
import json
import time
from pathlib import Path

import torch

import geotrain
from geotrain.lab.demo import plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=plain.ByteConfig().num_layers)
    parser.add_argument("--save", type=Path, help="write this region's parameters to this file")
    parser.add_argument("--json", action="store_true", help="one JSON object per step on stdout")
    options = parser.parse_args()

    config = plain.ByteConfig(num_layers=options.layers)
    region = geotrain.attach()
    segment = region.segment(
        lambda: plain.ByteTransformer(config),
        split=geotrain.Split("tok_embeddings", "layers", ("norm", "output")),
    )
    region.init_weights(segment)
    optimizer = torch.optim.AdamW(
        segment.parameters(), lr=plain.LEARNING_RATE, weight_decay=plain.WEIGHT_DECAY
    )
    pipeline = region.pipeline(
        segment,
        optimizer,
        loss_fn=plain.loss_sum,
        loss_reduction="sum",
        max_grad_norm=plain.MAX_GRAD_NORM,
    )
    loader = None
    if region.reads_data:
        loader = plain.batches(
            seed=options.seed, steps=options.steps, batch=options.batch, context=config.context
        )
    for result in pipeline.fit(loader, steps=options.steps):
        if options.json:
            print(json.dumps(_line(result)), flush=True)
    if options.save is not None:
        torch.save(segment.state_dict(), options.save)


def _line(result: geotrain.StepResult) -> dict[str, object]:
    names = ["step", "loss", "grad_norm", "num_tokens", "step_s", "num_microbatches", "windows"]
    names += ["wan_bytes", "committed", "reason", "attribution_s"]
    line: dict[str, object] = {"event": "step"} | {name: getattr(result, name) for name in names}
    # One machine has one monotonic clock, so its regions can be laid side by side.
    line["verdicts"] = [verdict.to_record() for verdict in result.verdicts]
    line["ended_s"] = time.monotonic()
    line["trace"] = [[a.kind, a.microbatch, a.begin_s, a.end_s] for a in result.trace]
    return line


if __name__ == "__main__":
    main()
