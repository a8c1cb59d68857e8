"""Nested state to flat tensors plus JSON, and back, types kept and without pickle.

What JSON lacks is written as an object with the key "$", which names the type:
{"$": "tuple", "v": [...]}. Tensors and arrays go aside under a path-like name.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geotrain.errors import ConfigError
from geotrain.state.errors import CheckpointError

_TAG = "$"
_ALLOWED = (
    "None, bool, int, float, str, bytes, list, tuple, dict, tensors, numpy scalars and arrays"
)
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def pack_object(state: Any, prefix: str) -> tuple[dict[str, Tensor], Any]:
    """Flatten any state_dict: a scheduler's, a loader's, a scaler's, a user hook's.

    Args:
        state: None, bool, int, float, str, bytes, list, tuple, dict (any such keys; also
            OrderedDict and Counter), dense tensors, numpy scalars and arrays, nested at will.
        prefix: Where the names of the tensors start, "loader" say.

    Returns:
        The tensors by name, sharing memory with `state`, and a value for json.dumps.

    Raises:
        ConfigError: Something else is in it; names its path and type.
    """
    packer = _Packer()
    node = packer.pack(state, prefix)
    return packer.tensors, node


def unpack_object(tensors: Mapping[str, Tensor], node: Any) -> Any:
    """Undo `pack_object`. Tensors come back as they are in `tensors`, not copied.

    Raises:
        CheckpointError: `node` names a tensor that is not there, or a type unknown to this version.
    """
    if type(node) is list:
        return [unpack_object(tensors, item) for item in node]
    if type(node) is not dict:
        return node
    if _TAG not in node:
        return {key: unpack_object(tensors, value) for key, value in node.items()}
    return _unpack_tagged(tensors, node)


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def pack(self, value: Any, path: str) -> Any:
        kind = type(value)  # exact types: a subclass would come back as something else
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
        if kind is bytes:
            return {_TAG: "bytes", "v": base64.b64encode(value).decode("ascii")}
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {_TAG: "tuple", "v": self._items(value, path)}
        if kind in _MAPPINGS:
            return self._mapping(value, path)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, path)
        raise _unsupported(path, kind)

    def _items(self, values: list[Any] | tuple[Any, ...], path: str) -> list[Any]:
        return [self.pack(value, f"{path}/{index}") for index, value in enumerate(values)]

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        kind = _MAPPINGS[type(value)]
        if kind == "dict" and all(type(key) is str for key in value) and _TAG not in value:
            return {key: self.pack(item, f"{path}/{key}") for key, item in value.items()}
        pairs = [
            [self.pack(key, f"{path} (a key)"), self.pack(item, f"{path}/{key}")]
            for key, item in value.items()
        ]
        return {_TAG: kind, "v": pairs}

    def _tensor(self, value: Tensor, path: str) -> Any:
        if value.layout != torch.strided or value.is_quantized:
            raise _unsupported(path, f"tensor of layout {value.layout}")
        return {_TAG: "tensor", "v": self._put(value.detach(), path)}

    def _numpy(self, value: "np.ndarray[Any, Any] | np.generic", path: str) -> Any:
        dtype = value.dtype
        if dtype.hasobject or dtype.names is not None:
            raise _unsupported(path, f"numpy value of dtype {dtype}")
        if isinstance(value, np.generic):
            raw = base64.b64encode(value.tobytes()).decode("ascii")
            return {_TAG: "scalar", "dtype": dtype.str, "v": raw}
        # As bytes: torch lacks some of numpy's dtypes and its byte orders.
        data = (
            torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            if value.size
            else (torch.empty(0, dtype=torch.uint8))
        )
        name = self._put(data, path)
        return {_TAG: "array", "dtype": dtype.str, "shape": list(value.shape), "v": name}

    def _put(self, tensor: Tensor, path: str) -> str:
        name = next(name for name in _names_from(path) if name not in self.tensors)
        self.tensors[name] = tensor
        return name


def _names_from(path: str) -> Iterator[str]:
    """The path, then variants: {"a/b": t, "a": {"b": t}} wants one name twice."""
    yield path
    number = 1
    while True:
        yield f"{path}~{number}"
        number += 1


def _unsupported(path: str, kind: object) -> ConfigError:
    what = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
    return ConfigError(
        f"{path}: a {what} cannot be saved in a checkpoint; state_dict() may hold {_ALLOWED}"
    )


def _unpack_tagged(tensors: Mapping[str, Tensor], node: dict[str, Any]) -> Any:
    kind, value = node[_TAG], node.get("v")
    if kind == "float":
        return float(str(value))
    if kind == "bytes":
        return base64.b64decode(str(value))
    if kind == "tuple":
        return tuple(unpack_object(tensors, value))
    if kind == "tensor":
        return _named(tensors, value)
    if kind == "scalar":
        return np.frombuffer(base64.b64decode(str(value)), dtype=node["dtype"])[0]
    if kind == "array":
        data = _named(tensors, value).cpu().contiguous().numpy().tobytes()
        return np.frombuffer(bytearray(data), dtype=node["dtype"]).reshape(node["shape"])
    for mapping, name in _MAPPINGS.items():
        if kind == name:
            pairs = unpack_object(tensors, value)
            return mapping({key: item for key, item in pairs})
    raise CheckpointError(
        f'the checkpoint holds a value of the unknown kind "{kind}"; it was written by a newer '
        "geotrain: resume with that version"
    )


def _named(tensors: Mapping[str, Tensor], name: Any) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f'the checkpoint lacks the tensor "{name}" that its state refers to')
    return tensor
