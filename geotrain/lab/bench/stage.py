"""A stage that takes a given time and passes a real tensor on.

geotrain and torch are measured with this same stage. Its time runs from the moment it is called,
and what it does itself (a copy of the tensor) is part of it; what wakes it late is not made good.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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
        time.sleep(0)  # releases the interpreter lock
    return result


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        ctx.backward_s = backward_s
        return _taking(forward_s, x.clone)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        passed_on = _taking(ctx.backward_s, grad.clone)
        return passed_on, grad.flatten()[0].clone(), None, None


class SleepStage(nn.Module):
    """Sleeps instead of computing, so that a step measures the pipeline and not the machine."""

    def __init__(self, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.backward_s = backward_s
        # So that the first stage has a backward as well.
        self.weight = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch does not say what apply() takes and returns.
        out: torch.Tensor = _Sleep.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.forward_s, self.backward_s
        )
        return out


class SleepModel(nn.Module):
    """The whole line of stages; the names of its parameters are the same in every region."""

    def __init__(self, forward_s: list[float], backward_s: list[float]) -> None:
        super().__init__()
        times = zip(forward_s, backward_s, strict=True)
        self.stages = nn.ModuleDict(
            {str(i): SleepStage(forward_s=f, backward_s=b) for i, (f, b) in enumerate(times)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages.values():
            x = stage(x)
        return x

    def only(self, index: int) -> "SleepModel":
        """The part with one stage."""
        part = SleepModel([], [])
        part.stages[str(index)] = self.stages[str(index)]
        return part


def mean_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that costs next to nothing."""
    return output.mean() * target.mean()


def make_batch(num_microbatches: int, boundary_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One sample a microbatch, of as many bytes as shall cross each boundary."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_microbatches, max(1, boundary_bytes // 4), generator=generator)
    return x, torch.ones(num_microbatches, 1)
