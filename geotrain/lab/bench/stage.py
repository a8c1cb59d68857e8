"""A stage that takes a given time and passes a real tensor on."""

import time
from typing import Any

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad.clone(), grad.flatten()[0].clone(), None, None


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
