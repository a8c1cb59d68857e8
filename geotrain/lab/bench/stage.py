"""A stage that takes a given time and passes a real tensor on.

geotrain and torch are measured with this same stage. Its time runs from the moment it is called,
and what it does itself (a copy of the tensor, in the last stage the loss as well) is part of it;
what wakes it late is not made good.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from geotrain.lab.bench.options import Work

_WAKING_S = 200e-6
"""Spent awake before the time is up: a sleep ends some 60 to 100 us late on an idle machine."""


def _sleep_until(due_s: float) -> None:
    left_s = due_s - time.monotonic() - _WAKING_S
    if left_s > 0:
        time.sleep(left_s)
    while time.monotonic() < due_s:
        pass  # even a sleep of no length takes 60 us, and no other thread of ours is in a hurry


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """How long a stage takes for a microbatch."""

    fixed_s: float
    sample_s: float = 0.0
    """What each of its samples adds."""

    def of(self, x: torch.Tensor) -> float:
        return self.fixed_s + self.sample_s * x.shape[0]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: "SleepStage"
    ) -> torch.Tensor:
        ctx.stage, ctx.backward_s = stage, stage.backward_time.of(x)
        stage.forward_due_s = time.monotonic() + stage.forward_time.of(x)
        out = x.clone()
        if not stage.is_last:  # there the loss is still to come
            _sleep_until(stage.forward_due_s)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        stage = ctx.stage
        began_s = stage.backward_began_s if stage.is_last else time.monotonic()
        passed_on, weight_grad = grad.clone(), grad.flatten()[0].clone()
        _sleep_until(began_s + ctx.backward_s)
        return passed_on, weight_grad, None


class SleepStage(nn.Module):
    """Sleeps instead of computing, so that a step measures the pipeline and not the machine.

    Args:
        is_last: Whether `loss` follows each forward, and is part of its time and of the backward's.
    """

    def __init__(self, *, forward: Duration, backward: Duration, is_last: bool = False) -> None:
        super().__init__()
        self.forward_time = forward
        self.backward_time = backward
        self.is_last = is_last
        self.forward_due_s = self.backward_began_s = 0.0
        # So that the first stage has a backward as well.
        self.weight = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch does not say what apply() takes and returns.
        out: torch.Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return out

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean of what the last stage has just put out, once its forward's time is up."""
        mean: torch.Tensor = _Mean.apply(output, self)  # type: ignore[no-untyped-call]
        loss = mean * target.mean()
        _sleep_until(self.forward_due_s)
        return loss


class _Mean(torch.autograd.Function):
    """The mean, whose gradient is one number seen as a tensor: torch's own fills one with it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: SleepStage) -> torch.Tensor:
        ctx.shape, ctx.stage = x.shape, stage
        return x.mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.stage.backward_began_s = time.monotonic()
        each: torch.Tensor = grad / ctx.shape.numel()
        return each.expand(ctx.shape), None


def stage_of(work: Work, index: int) -> SleepStage:
    """The stage of one region."""
    return SleepStage(
        forward=Duration(fixed_s=work.forward_s[index], sample_s=work.forward_sample_s),
        backward=Duration(fixed_s=work.backward_s[index], sample_s=work.backward_sample_s),
        is_last=index == work.num_stages - 1,
    )


class SleepModel(nn.Module):
    """The whole line of stages; the names of its parameters are the same in every region."""

    def __init__(self, stages: Mapping[str, SleepStage]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict(stages)

    @classmethod
    def of(cls, work: Work) -> "SleepModel":
        return cls({str(index): stage_of(work, index) for index in range(work.num_stages)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages.values():
            x = stage(x)
        return x

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """`SleepStage.loss` of the stage that put this out."""
        last = list(self.stages.values())[-1]
        assert isinstance(last, SleepStage)
        return last.loss(output, target)

    def only(self, index: int) -> "SleepModel":
        """The part with one stage."""
        stage = self.stages[str(index)]
        assert isinstance(stage, SleepStage)
        return SleepModel({str(index): stage})


def make_batch(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's samples, each of as many bytes as shall cross each boundary for it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(work.global_batch, max(1, work.boundary_bytes // 4), generator=generator)
    return x, torch.ones(work.global_batch, 1)
