"""A stage that takes a given time and passes a real tensor on.

geotrain and torch are measured with this same stage. Its time runs from the moment it is called,
and what it does itself (a copy of the tensor) is part of it; what wakes it late is not made good.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from geotrain.lab.bench.options import Work

_WAKING_S = 200e-6
"""Spent awake before the time is up: a sleep ends some 60 to 100 us late on an idle machine."""


def _taking(duration_s: float, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of `work`, not before `duration_s` have passed since the call."""
    due = time.monotonic() + duration_s
    result = work()
    left_s = due - time.monotonic() - _WAKING_S
    if left_s > 0:
        time.sleep(left_s)
    while time.monotonic() < due:
        pass  # even a sleep of no length takes 60 us, and no other thread of ours is in a hurry
    return result


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
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward: Duration, backward: Duration
    ) -> torch.Tensor:
        ctx.backward_s = backward.of(x)
        return _taking(forward.of(x), x.clone)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        passed_on = _taking(ctx.backward_s, grad.clone)
        return passed_on, grad.flatten()[0].clone(), None, None


class SleepStage(nn.Module):
    """Sleeps instead of computing, so that a step measures the pipeline and not the machine."""

    def __init__(self, *, forward: Duration, backward: Duration) -> None:
        super().__init__()
        self.forward_time = forward
        self.backward_time = backward
        # So that the first stage has a backward as well.
        self.weight = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch does not say what apply() takes and returns.
        out: torch.Tensor = _Sleep.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.forward_time, self.backward_time
        )
        return out


def stage_of(work: Work, index: int) -> SleepStage:
    """The stage of one region."""
    return SleepStage(
        forward=Duration(fixed_s=work.forward_s[index], sample_s=work.forward_sample_s),
        backward=Duration(fixed_s=work.backward_s[index], sample_s=work.backward_sample_s),
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

    def only(self, index: int) -> "SleepModel":
        """The part with one stage."""
        stage = self.stages[str(index)]
        assert isinstance(stage, SleepStage)
        return SleepModel({str(index): stage})


class _Mean(torch.autograd.Function):
    """The mean, whose gradient is one number seen as a tensor.

    torch's own fills a tensor with it: half a millisecond that belongs to no stage.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        each: torch.Tensor = grad / ctx.shape.numel()
        return each.expand(ctx.shape)


def mean_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that costs next to nothing."""
    mean: torch.Tensor = _Mean.apply(output)  # type: ignore[no-untyped-call]  # torch leaves it so
    return mean * target.mean()


def make_batch(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's samples, each of as many bytes as shall cross each boundary for it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(work.global_batch, max(1, work.boundary_bytes // 4), generator=generator)
    return x, torch.ones(work.global_batch, 1)
