"""An optimizer's state by parameter names instead of positions."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from geotrain.errors import ConfigError
from geotrain.state.errors import CheckpointError
from geotrain.state.packing import pack_object, unpack_object


def pack_optimizer(
    optimizer: Optimizer, names: Mapping[Parameter, str], prefix: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as tensors "<prefix>/<parameter>/<key>" and a JSON-able rest.

    The tensors share memory with the live state: write or clone them before the next step.

    Args:
        names: The original name of each parameter.
        prefix: "optim.0", say.

    Raises:
        ConfigError: The optimizer holds a parameter without a name, or state of a kind that
            cannot be saved.
    """
    raw = optimizer.state_dict()
    name_of = _names_of_ids(optimizer, raw, names)
    tensors: dict[str, Tensor] = {}

    def packed(value: Any, path: str) -> Any:
        found, node = pack_object(value, f"{prefix}/{path}")
        tensors.update(found)
        return node

    state: dict[str, Any] = {}
    shared: dict[str, Any] = {}  # some optimizers keep state that belongs to no parameter
    for key, entry in raw["state"].items():
        if key in name_of:
            state[name_of[key]] = packed(entry, name_of[key])
        else:
            shared[str(key)] = packed(entry, f"shared/{key}")
    groups = []
    for index, group in enumerate(raw["param_groups"]):
        options = {key: value for key, value in group.items() if key != "params"}
        group_names = [name_of[position] for position in group["params"]]
        groups.append({"params": group_names, "options": packed(options, f"group.{index}")})
    extra = {
        "optimizer": type(optimizer).__name__,
        "state": state,
        "shared": shared,
        "groups": groups,
    }
    return tensors, extra


def unpack_optimizer(
    optimizer: Optimizer,
    names: Mapping[Parameter, str],
    prefix: str,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
) -> None:
    """Put back what `pack_optimizer` gave, so that the next step is the same to the last bit.

    Hyper-parameters come from the checkpoint too. `tensors` are copied, not kept.

    Raises:
        CheckpointError: It was another optimizer, or had other parameters or groups.
    """
    raw = optimizer.state_dict()
    name_of = _names_of_ids(optimizer, raw, names)
    _check_same(optimizer, raw, name_of, prefix, extra)
    copies = {
        name: tensor.clone() for name, tensor in tensors.items() if name.startswith(f"{prefix}/")
    }
    id_of = {name: position for position, name in name_of.items()}
    state = {
        id_of[name]: unpack_object(copies, node) for name, node in dict(extra["state"]).items()
    }
    shared = {key: unpack_object(copies, node) for key, node in dict(extra["shared"]).items()}
    groups = [
        {**unpack_object(copies, saved["options"]), "params": group["params"]}
        for saved, group in zip(extra["groups"], raw["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**raw, "state": {**state, **shared}, "param_groups": groups})
    _undo_casts(optimizer, names, {name_of[position]: entry for position, entry in state.items()})


def _names_of_ids(
    optimizer: Optimizer, raw: Mapping[str, Any], names: Mapping[Parameter, str]
) -> dict[Any, str]:
    """Position in the state_dict -> parameter name; both list groups and parameters in order."""
    name_of = {}
    for group, raw_group in zip(optimizer.param_groups, raw["param_groups"], strict=True):
        for parameter, position in zip(group["params"], raw_group["params"], strict=True):
            name = names.get(parameter)
            if name is None:
                raise ConfigError(
                    f"{type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in this region's segment; build the "
                    "optimizer from the parameters of what region.segment() returned"
                )
            name_of[position] = name
    return name_of


def _check_same(
    optimizer: Optimizer,
    raw: Mapping[str, Any],
    name_of: Mapping[Any, str],
    prefix: str,
    extra: Mapping[str, Any],
) -> None:
    kind = type(optimizer).__name__
    if extra.get("optimizer") != kind:
        raise CheckpointError(
            f"{prefix}: the checkpoint was written with {extra.get('optimizer')}, this script uses "
            f"{kind}; use the same optimizer, or start from the weights alone"
        )
    saved_groups = extra["groups"]
    if len(saved_groups) != len(raw["param_groups"]):
        raise CheckpointError(
            f"{prefix}: the checkpoint has {len(saved_groups)} parameter groups, this script's "
            f"{kind} has {len(raw['param_groups'])}; build the same groups"
        )
    for index, (saved, group) in enumerate(zip(saved_groups, raw["param_groups"], strict=True)):
        mine = {name_of[position] for position in group["params"]}
        theirs = set(saved["params"])
        if mine != theirs:
            raise CheckpointError(
                f"{prefix}, parameter group {index}: {describe_difference(theirs, mine)}; "
                "resume with the same model, split and groups"
            )


def describe_difference(saved: set[str], mine: set[str]) -> str:
    """Which names only one side has, shortened."""
    parts = []
    for only, where in ((saved - mine, "the checkpoint"), (mine - saved, "this script")):
        if only:
            some = ", ".join(sorted(only)[:3])
            more = f" and {len(only) - 3} more" if len(only) > 3 else ""
            parts.append(f"only in {where}: {some}{more}")
    return "; ".join(parts)


def _undo_casts(
    optimizer: Optimizer, names: Mapping[Parameter, str], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Optimizer.load_state_dict casts state to the parameter's dtype (fp32 moments of bf16
    weights lose bits); put the saved dtype back."""
    for parameter, entry in optimizer.state.items():
        if not isinstance(parameter, Parameter):  # shared state, under a string
            continue
        for key, value in saved.get(names[parameter], {}).items():
            loaded = entry.get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor):
                if loaded.dtype != value.dtype:
                    entry[key] = value.to(loaded.device)
