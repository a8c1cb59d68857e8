"""A segment's parameters: memory for those built on the meta device, and their first values."""

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from geotrain.errors import ConfigError


def materialise(segment: nn.Module, *, device: torch.device, dtype: torch.dtype | None) -> None:
    """Give a segment's meta parameters memory, and move the rest to `device`.

    New parameters are NaN until they are initialised or loaded, so that a forgotten one cannot
    train on noise. Parameters shared inside the segment stay shared.

    Args:
        dtype: Of the floating-point parameters; None leaves them as the model has them. Buffers
            always keep their dtype: tables of positions and running statistics need it.

    Raises:
        ConfigError: A buffer was computed from a parameter that has no values yet.
    """
    made: dict[int, nn.Parameter] = {}
    for module in segment.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _materialised(parameter, device, dtype)
            if made[id(parameter)] is not parameter:
                setattr(module, name, made[id(parameter)])
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                raise ConfigError(
                    f"buffer {name} of {type(module).__name__} is computed from a parameter that "
                    f"has no values yet; pass a built model: region.segment(Model(...), ...)"
                )
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _materialised(
    parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None
) -> nn.Parameter:
    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    if not parameter.is_meta:
        if (parameter.dtype, parameter.device) == (wanted, device):
            return parameter
        moved = parameter.detach().to(device=device, dtype=wanted)
        return nn.Parameter(moved, requires_grad=parameter.requires_grad)
    real = torch.empty(parameter.shape, dtype=wanted, device=device)
    if real.is_floating_point():
        real.fill_(float("nan"))
    return nn.Parameter(real, requires_grad=parameter.requires_grad)


def uninitialised(segment: nn.Module) -> list[str]:
    """Names of parameters that hold nothing but NaN."""
    return [
        name
        for name, parameter in segment.named_parameters()
        if parameter.is_floating_point()
        and parameter.numel() > 0
        and bool(parameter.detach().isnan().all())
    ]


def module_seed(seed: int, name: str) -> int:
    """The seed with which the module called `name` is initialised, whatever region holds it."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % 2**63


def init_weights(
    segment: nn.Module,
    *,
    seed: int,
    init: Callable[[nn.Module, str], None] | None = None,
) -> None:
    """Initialise each module from a seed of its own name: the same weights under any split.

    Args:
        init: Called as `init(module, name)` for each module with parameters of its own; by default
            the module's `reset_parameters()`.

    Raises:
        ConfigError: naming a module that has parameters but no `reset_parameters`.
    """
    state = torch.get_rng_state()
    try:
        for name, module in segment.named_modules():
            if not list(module.named_parameters(recurse=False)):
                continue
            torch.manual_seed(module_seed(seed, name))
            if init is not None:
                init(module, name)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()
            else:
                raise ConfigError(
                    f"region.init_weights(): {name} ({type(module).__name__}) has no "
                    f"reset_parameters(); pass init=fn, called as fn(module, name)"
                )
    finally:
        torch.set_rng_state(state)
