"""What a stage needs in memory, term by term, before it runs out.

Parameters, gradients and optimizer state are exact; what a microbatch in flight keeps is measured
in the first steps. A plan is refused above SHARE of what the device has: the rest is for fragments
and for what nobody counted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from geotrain.pipeline.memory import SHARE

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One stage's memory, in bytes."""

    parameters: int
    """With buffers."""
    gradients: int
    optimizer: int
    """0 where the optimizer is of a kind that is not known before its first step."""
    activations: int
    """Of one microbatch in flight; 0 until it has been measured."""
    in_flight: int
    """How many there may be."""
    arena: int
    """Where the arena lies in the same memory, which it does on a CPU."""

    @property
    def terms(self) -> dict[str, int]:
        """Every term by its name."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            f"activations of {self.in_flight} microbatches in flight": (
                self.in_flight * self.activations
            ),
            "arena": self.arena,
        }

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {size_text(size)}" for name, size in self.terms.items() if size)

    def refusal(self, device_bytes: int) -> str:
        """Why this does not fit into a device of so many bytes, and what to do; "" where it does.

        The term that is named is the largest.
        """
        most = int(SHARE * device_bytes)
        if self.total <= most:
            return ""
        terms = self.terms
        largest = max(terms, key=terms.__getitem__)
        return (
            f"this stage needs {size_text(self.total)} of memory, more than {SHARE:.0%} of the "
            f"{size_text(device_bytes)} that it can have; too large: {largest} "
            f"({size_text(terms[largest])}). All of it: {self}. {self._remedy(largest, most)}"
        )

    def _remedy(self, largest: str, most: int) -> str:
        if not largest.startswith("activations"):
            return (
                "Lower site.arena_mib"
                if largest == "arena"
                else "Give this region fewer layers in run.regions"
            )
        room = (most - (self.total - self.in_flight * self.activations)) // self.activations
        if room < 1:
            return "Raise run.plan.microbatches, so that each of them is smaller"
        return (
            f"There is room for {room} in flight: lower run.plan.window, set site.limits.in_flight "
            f"to {room}, or raise run.plan.microbatches"
        )


def size_text(num_bytes: int) -> str:
    """Such as "1.25 GB", "640 MB", "12 kB"."""
    if num_bytes >= _GB:
        return f"{num_bytes / _GB:.2f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors that share nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_bytes(optimizers: Iterable[optim.Optimizer]) -> int:
    """Bytes of the tensors that optimizers hold at present."""
    return tensor_bytes(
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the gradients that will be."""
    return tensor_bytes(parameter for parameter in parameters if parameter.requires_grad)


def optimizer_bytes(optimizers: Sequence[optim.Optimizer]) -> int | None:
    """Bytes of all optimizers' state: as it is for parameters that have one, else as it will be.

    None where an optimizer is of a kind of which that is not known.
    """
    total = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state:
                    tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
                    total += tensor_bytes(tensors)
                    continue
                if not parameter.requires_grad:
                    continue
                kept = _KEPT.get(type(optimizer))
                if kept is None:
                    return None
                copies, scalars = kept(group)
                total += copies * tensor_bytes([parameter]) + scalars * _scalar_bytes()
    return total


def _scalar_bytes() -> int:
    """Of the counters that torch's optimizers keep as tensors of no dimension."""
    return 8 if torch.get_default_dtype() == torch.float64 else 4


_Kept = Callable[[Mapping[str, Any]], tuple[int, int]]
"""From a parameter group's settings: (tensors like the parameter, scalar tensors)."""


def _adam(group: Mapping[str, Any]) -> tuple[int, int]:
    return 3 if group["amsgrad"] else 2, 1


_KEPT: dict[type[optim.Optimizer], _Kept] = {
    optim.SGD: lambda group: (1 if group["momentum"] else 0, 0),
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.NAdam: lambda group: (2, 2),
    optim.RAdam: lambda group: (2, 1),
    optim.Adamax: lambda group: (2, 1),
    optim.Adadelta: lambda group: (2, 1),
    optim.ASGD: lambda group: (1, 3),
    optim.Rprop: lambda group: (2, 1),
    optim.RMSprop: lambda group: (1 + bool(group["momentum"]) + bool(group["centered"]), 1),
}
"""Adagrad has its state from the start."""
