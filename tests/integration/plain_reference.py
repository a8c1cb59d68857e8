"""The plain torch loop that the regions are compared with; it imports nothing of geotrain.

python plain_reference.py (OUT PRECISION MICROBATCHES)...
"""

import hashlib
import math
import sys
from pathlib import Path
from typing import Any

import torch
from parity_cases import CASES, DTYPES, IGNORED, SEED, Case
from torch import nn


def init_weights(model: nn.Module, seed: int) -> None:
    """Weights from (seed, module name) alone."""
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
            module.reset_parameters()


def split(tree: Any, parts: int) -> list[Any]:
    """Microbatches of a tensor or a tuple of tensors, the larger ones first."""
    if isinstance(tree, torch.Tensor):
        return list(tree.tensor_split(parts))
    return list(zip(*(child.tensor_split(parts) for child in tree), strict=True))


def microbatches(batch: Any, num_microbatches: int) -> list[tuple[Any, torch.Tensor]]:
    inputs, targets = batch
    parts = min(num_microbatches, targets.shape[0])
    return list(zip(split(inputs, parts), split(targets, parts), strict=True))


def count(targets: torch.Tensor) -> int:
    return int((targets != IGNORED).sum())


def loss_sum(case: Case, model: nn.Module, inputs: Any, targets: torch.Tensor) -> Any:
    """The summed loss of one microbatch, None for a mean over nothing."""
    loss = case.loss(model(inputs), targets)
    if case.reduction == "sum":
        return loss
    return loss * count(targets) if count(targets) else None


def evaluate(case: Case, model: nn.Module, dtype: torch.dtype, num_microbatches: int) -> float:
    total, targets_seen = 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in case.evaluation_batches(dtype):
            for inputs, targets in microbatches(batch, num_microbatches):
                loss = loss_sum(case, model, inputs, targets)
                total += 0.0 if loss is None else loss.double().item()
                targets_seen += count(targets)
    model.train()
    return total / targets_seen


def run(case: Case, *, dtype: torch.dtype, num_microbatches: int) -> dict[str, Any]:
    model = case.model().to(dtype)
    init_weights(model, SEED)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = case.optimizer(model.named_parameters())
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    losses, norms, evaluations = [], [], []
    for step, batch in enumerate(case.batches(dtype)):
        if case.evaluate and step in (0, 3):
            evaluations.append(evaluate(case, model, dtype, num_microbatches))
        total = count(batch[1])
        summed = 0.0
        optimizer.zero_grad()
        for inputs, targets in microbatches(batch, num_microbatches) if total else ():
            loss = loss_sum(case, model, inputs, targets)
            if loss is not None:
                summed += loss.detach().double().item()
                (loss / total).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm or math.inf)
        losses.append(summed / total if total else math.nan)
        norms.append(float(norm))
        if total and math.isfinite(summed) and bool(norm.isfinite()):
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    if case.evaluate:
        evaluations.append(evaluate(case, model, dtype, num_microbatches))
    return {
        "initial": initial,
        "parameters": model.state_dict(),
        "losses": losses,
        "norms": norms,
        "evaluations": evaluations,
    }


def main() -> None:
    torch.set_num_threads(1)
    for out, precision, num_microbatches in zip(*[iter(sys.argv[1:])] * 3, strict=True):
        results = {
            case.name: run(case, dtype=DTYPES[precision], num_microbatches=int(num_microbatches))
            for case in CASES
            if not case.random
        }
        draft = Path(f"{out}.draft")
        torch.save(results, draft)
        draft.rename(out)


if __name__ == "__main__":
    main()
