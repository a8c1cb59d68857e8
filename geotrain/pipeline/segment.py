"""The layers that a region owns, out of a model that no region holds whole.

The model is built with its parameters on the meta device, so it costs no memory; then only this
region's layers get real parameters. Names stay those of the whole model, whatever the split.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from geotrain.errors import ConfigError


class Split:
    """How to cut a model whose layers stand in one ModuleList.

    Args:
        parts: Attribute names in the order of the forward pass; exactly one names the ModuleList.
            What stands before it goes to the first region, what stands after it to the last. A
            tuple groups names that run one after another. Dotted names reach into submodules.

    Each module is called with what the one before returned, as in nn.Sequential.
    """

    def __init__(self, *parts: str | Sequence[str]) -> None:
        self.names = [
            name for part in parts for name in ((part,) if isinstance(part, str) else tuple(part))
        ]

    def __repr__(self) -> str:
        return f"Split({', '.join(map(repr, self.names))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """What a region knows of the whole model and of its own part in it."""

    fingerprint: str
    """Hash over the names, shapes and dtypes of the whole model and its order of layers."""
    parameter_index: dict[str, int]
    """Position of each parameter of this segment in the whole model's order."""
    layer_names: tuple[str, ...]
    """Names of this region's layers; each draws its own random numbers."""


class Segment(nn.Module):
    """A contiguous run of a model's layers under their original names.

    Called with the model's inputs in the first region and with what the region before sent
    elsewhere; each layer gets what the one before returned.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.layer_names = tuple(name for name, _ in layers)
        for name, layer in layers:
            parent: nn.Module = self
            *containers, last = name.split(".")
            for container in containers:
                if container not in parent._modules:
                    parent.add_module(container, nn.Module())
                parent = parent.get_submodule(container)
            parent.add_module(last, layer)

    def forward(self, x: Any) -> Any:
        for name in self.layer_names:
            x = self.get_submodule(name)(x)
        return x


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it, every parameter that a module registers lands on the meta device.

    Unlike torch.device("meta") this leaves buffers real, so that tables computed in a constructor
    (rotary frequencies, masks) keep their values. Initialising a meta parameter does nothing, so
    building a large model costs no time and no memory either.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_model(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """The model itself, or what the callable builds, with its parameters on the meta device."""
    if isinstance(model, nn.Module):
        return model
    try:
        with _parameters_on_meta():
            built = model()
    except RuntimeError as exc:
        raise ConfigError(
            f"region.segment(): building the model failed: {exc}. It runs with parameters "
            f"on the meta device; if a constructor computes with them, pass a built model instead"
        ) from exc
    if not isinstance(built, nn.Module):
        raise ConfigError(
            f"region.segment(): the callable returned a {type(built).__name__}, not an nn.Module"
        )
    return built


def _sequence(model: nn.Module, split: Split | None) -> tuple[list[str], list[str], list[str]]:
    """Names of the modules before the layers, of the layers, and of the modules after."""
    if split is None:
        if type(model).forward is not nn.Sequential.forward:
            raise ConfigError(
                f"region.segment(): a {type(model).__name__} needs split=geotrain.Split(...), that "
                f"names its modules in forward order, or a callable (model, region) -> nn.Module"
            )
        # Not named_children(): it lists a module that stands twice only once.
        return [], list(model._modules), []
    lists: list[int] = []
    for position, name in enumerate(split.names):
        try:
            module = model.get_submodule(name)
        except AttributeError as exc:
            raise ConfigError(
                f"{split!r}: the model has no module {name!r}; its modules are "
                f"{', '.join(child for child, _ in model.named_children())}"
            ) from exc
        if isinstance(module, nn.ModuleList):
            lists.append(position)
    if len(lists) != 1:
        raise ConfigError(f"{split!r}: exactly one name must be an nn.ModuleList, {len(lists)} are")
    at = lists[0]
    layers = model.get_submodule(split.names[at])
    children = [f"{split.names[at]}.{name}" for name in layers._modules]
    return split.names[:at], children, split.names[at + 1 :]


def count_layers(model: nn.Module, split: Split | None) -> int:
    """Number of layers that run.regions' ranges count."""
    return len(_sequence(model, split)[1])


def split_model(
    model: nn.Module,
    split: Split | None,
    *,
    ranges: Sequence[tuple[int, int]],
    index: int,
) -> Segment:
    """Cut region `index`'s segment out of a model.

    Args:
        ranges: Half-open layer range of every region, in order.

    Raises:
        ConfigError: when the ranges do not cover the layers, a parameter belongs to no named
            module, or a parameter is shared between regions.
    """
    before, layers, after = _sequence(model, split)
    if ranges[-1][1] != len(layers):
        raise ConfigError(
            f"run.regions: the layer ranges end at {ranges[-1][1]}, but the model has "
            f"{len(layers)} layers; every layer must belong to exactly one region"
        )
    owned: list[list[str]] = []
    for position, (first, last) in enumerate(ranges):
        names = layers[first:last]
        if position == 0:
            names = before + names
        if position == len(ranges) - 1:
            names = names + after
        owned.append(names)
    _check_coverage(model, owned)
    return Segment([(name, model.get_submodule(name)) for name in owned[index]])


def _check_coverage(model: nn.Module, owned: Sequence[Sequence[str]]) -> None:
    homes: dict[int, tuple[str, int]] = {}
    for region, names in enumerate(owned):
        for layer_name in names:
            for name, parameter in model.get_submodule(layer_name).named_parameters(layer_name):
                first_name, home = homes.setdefault(id(parameter), (name, region))
                if home != region:
                    raise ConfigError(
                        f"{first_name} and {name} are one parameter, but lie in two regions; untie "
                        f"them, or choose layer ranges that keep them in one region"
                    )
    left_out = _left_out(model, [name for names in owned for name in names])
    if left_out:
        raise ConfigError(
            f"the split leaves out {', '.join(left_out[:5])}"
            f"{' and more' if len(left_out) > 5 else ''}; name every module of the model in the "
            f"split, and move what takes no part in the forward out of it"
        )


def _left_out(model: nn.Module, named: Sequence[str]) -> list[str]:
    """Parameters, buffers, modules and hooks of the model that no named module has."""

    def covered(name: str) -> bool:
        return any(name == one or name.startswith(f"{one}.") for one in named)

    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    missing = [name for name in tensors if not covered(name)]
    for name, module in model.named_modules():
        holds_named = name == "" or any(one.startswith(f"{name}.") for one in named)
        if not covered(name) and not holds_named:
            missing.append(f"{name} ({type(module).__name__})")
        if (
            holds_named
            and not covered(name)
            and (module._forward_hooks or module._forward_pre_hooks)
        ):
            missing.append(f"a forward hook of {name or 'the whole model'}")
    return missing


def fingerprint(model: nn.Module, order: Sequence[str]) -> str:
    """Hash of the whole model's parameter names, shapes and dtypes, and of its order of layers."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    digest.update("\n".join(order).encode())
    return digest.hexdigest()[:16]


def describe(
    model: nn.Module, segment: nn.Module, split: Split | Callable[..., nn.Module] | None
) -> SegmentInfo:
    """What the run needs to know of a segment; call it before the parameters materialise."""
    order: list[str] = []
    if split is None or isinstance(split, Split):
        before, layers, after = _sequence(model, split)
        order = before + layers + after
    # By identity: a shared parameter may have one name in the model and another in the segment.
    positions = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    own = {name: positions.get(id(parameter)) for name, parameter in segment.named_parameters()}
    unknown = [name for name, position in own.items() if position is None]
    if unknown:
        raise ConfigError(
            f"the segment has parameters that the model has not: {', '.join(unknown[:5])}; a "
            f"callable split must return parts of the model it was given"
        )
    return SegmentInfo(
        fingerprint=fingerprint(model, order),
        parameter_index={name: index for name, index in own.items() if index is not None},
        layer_names=tuple(_layer_names(segment)),
    )


def _layer_names(segment: nn.Module) -> Iterator[str]:
    if isinstance(segment, Segment):
        yield from segment.layer_names
        return
    for name, child in segment.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from (f"{name}.{inner}" for inner, _ in child.named_children())
        else:
            yield name
