"""What region.pipeline() refuses because it would fail, or compute something else, later."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from geotrain.errors import ConfigError
from geotrain.pipeline.microbatch import IGNORED_LABEL, count_targets


def check_loss(loss_fn: Any, reduction: str, num_targets: Callable[[Any], float]) -> None:
    """Compare a loss module's own settings with what the pipeline was told.

    Raises:
        ConfigError: The loss would be divided by something else than it sums over.
    """
    if reduction not in ("sum", "mean"):
        raise ConfigError(f'loss_reduction is "{reduction}"; allowed are "sum" and "mean"')
    own = getattr(loss_fn, "reduction", reduction)
    if own != reduction:
        raise ConfigError(
            f'loss_fn has reduction="{own}", region.pipeline() was given loss_reduction='
            f'"{reduction}"; give both the same'
        )
    counts_by_default = num_targets is count_targets
    ignored = getattr(loss_fn, "ignore_index", IGNORED_LABEL)
    if counts_by_default and ignored != IGNORED_LABEL:
        raise ConfigError(
            f"loss_fn ignores the label {ignored}, the default num_targets ignores "
            f"{IGNORED_LABEL}; pass num_targets=lambda targets: (targets != {ignored}).sum().item()"
        )
    if reduction == "mean" and counts_by_default and getattr(loss_fn, "weight", None) is not None:
        raise ConfigError(
            "loss_fn divides by the weights of its targets; pass num_targets=fn that adds those "
            "weights up, or the mean would depend on the number of microbatches"
        )


def check_training(
    segment: nn.Module,
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    max_grad_norm: float | None,
) -> None:
    """Raises ConfigError for what would fail only when the first step commits."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm must be > 0 (got {max_grad_norm}); None clips nothing")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"a {type(optimizer).__name__} is not a torch.optim.Optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS wants to evaluate the loss itself, which a pipeline cannot do")
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau steps on a metric: leave it out of region.pipeline() and call "
                "scheduler.step(report.loss) after pipeline.evaluate() in every region"
            )
    for name, module in segment.named_modules():
        if getattr(module, "sparse", False):
            raise ConfigError(
                f"{name} ({type(module).__name__}) makes sparse gradients, of which there is no "
                f"global norm; build it with sparse=False"
            )


def check_keep(keep: Any, *, at_least: int) -> None:
    """Raises ConfigError for a number of checkpoints that could leave no common one."""
    if keep is None or (type(keep) is int and keep >= at_least):
        return
    raise ConfigError(
        f"pipeline.save(): keep must be a whole number >= {at_least}, or None to keep all "
        f"(got {keep!r}); another region may still need the checkpoint before the newest"
    )
