"""What a region runs in the parity suite: every case, one pipeline after another, at each point.

python parity_rank.py (CONFIG OUT PRECISION)...
"""

import sys
from pathlib import Path
from typing import Any

import parity_models
import torch
from parity_cases import CASES, DTYPES, STEPS, Case

import geotrain

OTHERS_LIMIT_S = 150.0
"""For the points before, in which this region has no part."""


def run(region: geotrain.Region, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    segment = region.segment(case.model, split=geotrain.Split(*parity_models.SPLIT))
    region.init_weights(segment)
    initial = {name: value.clone() for name, value in segment.state_dict().items()}
    optimizer = case.optimizer(segment.named_parameters())
    pipeline = region.pipeline(
        segment,
        optimizer,
        loss_fn=case.loss,
        loss_reduction=case.reduction,
        scheduler=case.scheduler(optimizer) if case.scheduler else None,
        max_grad_norm=case.max_grad_norm,
    )
    results = []
    evaluations = []

    def evaluate() -> None:
        loader = case.evaluation_batches(dtype) if region.reads_data else None
        evaluations.append(pipeline.evaluate(loader).loss)

    if case.evaluate:
        evaluate()
    loader = case.batches(dtype) if region.reads_data else None
    for result in pipeline.fit(loader, steps=STEPS):
        results.append(result)
        if case.evaluate and len(results) == 3:
            evaluate()
    if case.evaluate:
        evaluate()
    return {
        "initial": initial,
        "parameters": segment.state_dict(),
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "evaluations": evaluations,
        "skipped": [r.step - 1 for r in results if not r.committed],
        "num_microbatches": [result.num_microbatches for result in results],
    }


def main() -> None:
    # One process for many points: it costs more to start than a point does to run.
    for config, out, precision in zip(*[iter(sys.argv[1:])] * 3, strict=True):
        region = geotrain.attach(config, timeout_s=OTHERS_LIMIT_S)
        results = {case.name: run(region, case, DTYPES[precision]) for case in CASES}
        region.close()
        draft = Path(f"{out}.draft")
        torch.save(results, draft)
        draft.rename(out)


if __name__ == "__main__":
    main()
