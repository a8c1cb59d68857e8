"""Cutting a batch into microbatches, and counting what it is divided by."""

from collections.abc import Iterator
from typing import Any

import torch

from geotrain.pipeline.tree import map_tensors

IGNORED_LABEL = -100
"""The label that torch's cross entropy ignores by default."""


def split_sizes(num_samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Samples in each microbatch: sizes differ by one at most, the larger ones first.

    A batch with fewer samples than microbatches gives one microbatch a sample.
    """
    parts = min(num_samples, num_microbatches)
    if parts == 0:
        return ()
    small, extra = divmod(num_samples, parts)
    return (small + 1,) * extra + (small,) * (parts - extra)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(tree, found.append)
    yield from found


def tree_bytes(tree: Any) -> int:
    """Bytes of all its tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tree))


def batch_size(batch: Any) -> int:
    """Number of samples: the first dimension, which all tensors of the batch share.

    Raises:
        ValueError: where the batch has no tensor with a dimension, or they disagree.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim() > 0}
    if not sizes:
        raise ValueError("the batch holds no tensor with a sample dimension")
    if len(sizes) > 1:
        raise ValueError(
            f"the batch's tensors disagree on the number of samples (first dimensions "
            f"{sorted(sizes)})"
        )
    return sizes.pop()


def split_batch(batch: Any, sizes: tuple[int, ...]) -> list[Any]:
    """The batch's tree once per microbatch, each tensor narrowed to its samples.

    Views of the batch: a model may change its input in place, so copy one before it runs. All of
    them at once would copy the whole batch before the step's first forward.
    """
    microbatches = []
    start = 0
    for size in sizes:

        def narrow(tensor: torch.Tensor, start: int = start, size: int = size) -> torch.Tensor:
            return tensor.narrow(0, start, size) if tensor.dim() > 0 else tensor

        microbatches.append(map_tensors(batch, narrow))
        start += size
    return microbatches


def count_targets(targets: Any) -> float:
    """Default `num_targets`: labels that are not ignored, or all elements of real-valued targets.

    Raises:
        ValueError: for targets that are not one tensor; the caller must then say how to count.
    """
    if not isinstance(targets, torch.Tensor):
        raise ValueError(
            f"targets are a {type(targets).__name__}, so what the loss is divided by is not clear; "
            f"pass region.pipeline(..., num_targets=fn)"
        )
    if targets.is_floating_point() or targets.is_complex():
        return float(targets.numel())
    return float((targets != IGNORED_LABEL).sum().item())
