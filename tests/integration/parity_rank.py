"""What a region runs in the parity suite: every case, one pipeline after another.

GEOTRAIN_CONFIG=site.toml python parity_rank.py REGION OUT_FOLDER PRECISION
"""

import sys
from pathlib import Path
from typing import Any

import parity_models
import torch
from parity_cases import CASES, DTYPES, STEPS, Case

import geotrain


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
    name, folder, precision = sys.argv[1:]
    region = geotrain.attach()
    results = {case.name: run(region, case, DTYPES[precision]) for case in CASES}
    torch.save(results, Path(folder) / f"{name}.pt")


if __name__ == "__main__":
    main()
