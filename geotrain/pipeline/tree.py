"""A boundary's content as a tree: tensors, None and scalars in tuples, lists and dicts.

The structure travels as a msgpack-able *spec* beside the tensors, so nothing is ever pickled.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Spec = list[Any]
"""`["T", leaf]` for a tensor, `["S", value]` for a scalar or None, `["t", specs]` for a tuple,
`["l", specs]` for a list, `["d", [[key, spec], ...]]` for a dict."""

MAX_DEPTH = 16


class TreeError(ValueError):
    """A tree holds what cannot cross a boundary, or a spec from a peer makes no sense."""


def flatten(tree: Any, *, path: str = "output") -> tuple[Spec, list[torch.Tensor]]:
    """Take a tree apart into its spec and its tensors, in order.

    Raises:
        TreeError: naming the path and the type of what cannot cross a boundary.
    """
    tensors: list[torch.Tensor] = []
    return _flatten(tree, path, 0, tensors), tensors


# Plain functions, not closures: a closure that calls itself is a reference cycle, and would keep
# its tensors until the collector comes by.
def _flatten(node: Any, path: str, depth: int, tensors: list[torch.Tensor]) -> Spec:
    if depth > MAX_DEPTH:
        raise TreeError(f"{path} is nested more than {MAX_DEPTH} deep")
    if isinstance(node, torch.Tensor):
        if node.layout is not torch.strided:
            raise TreeError(f"{path} is a sparse tensor; a boundary carries dense ones")
        tensors.append(node)
        return ["T", len(tensors) - 1]
    if node is None or isinstance(node, bool | int | float | str):
        _check_scalar(node, path)
        return ["S", node]
    if type(node) in (tuple, list):
        specs = [_flatten(node[i], f"{path}[{i}]", depth + 1, tensors) for i in range(len(node))]
        return ["t" if type(node) is tuple else "l", specs]
    if isinstance(node, dict) and all(isinstance(key, str) for key in node):
        items = [
            [key, _flatten(child, f"{path}[{key!r}]", depth + 1, tensors)]
            for key, child in node.items()
        ]
        return ["d", items]
    raise TreeError(
        f"{path} is a {type(node).__name__}; a boundary carries tensors, None, bool, int, "
        f"float and str in tuples, lists and dicts with str keys"
    )


def _check_scalar(value: Any, path: str) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TreeError(f"{path} is the integer {value}; a boundary carries 64 bits")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise TreeError(f"{path} is text that is not valid Unicode") from exc


def unflatten(spec: Spec, tensors: Sequence[torch.Tensor | None]) -> Any:
    """Put a tree together again. Raises TreeError for a spec that does not fit."""
    return _unflatten(spec, 0, tensors)


def _unflatten(node: Any, depth: int, tensors: Sequence[torch.Tensor | None]) -> Any:
    if depth > MAX_DEPTH or not isinstance(node, list | tuple) or len(node) != 2:
        raise TreeError("malformed tree")
    tag, content = node
    if tag == "T" and isinstance(content, int) and 0 <= content < len(tensors):
        return tensors[content]
    if tag == "S" and (content is None or isinstance(content, bool | int | float | str)):
        return content
    if tag in ("t", "l") and isinstance(content, list | tuple):
        children = [_unflatten(child, depth + 1, tensors) for child in content]
        return tuple(children) if tag == "t" else children
    if tag == "d" and isinstance(content, list | tuple):
        return {str(key): _unflatten(child, depth + 1, tensors) for key, child in content}
    raise TreeError("malformed tree")


def signature(spec: Spec, dtypes: Sequence[str]) -> str:
    """The structure and dtypes of a tree as text, without shapes and scalars' values."""
    tag, content = spec
    if tag == "T":
        return dtypes[content]
    if tag == "S":
        return type(content).__name__
    if tag == "d":
        return "{" + ", ".join(f"{key}: {signature(child, dtypes)}" for key, child in content) + "}"
    inner = ", ".join(signature(child, dtypes) for child in content)
    return f"({inner})" if tag == "t" else f"[{inner}]"


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """The same tree with `fn` applied to its tensors; anything else stays as it is."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(child, fn) for child in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(child, fn) for child in tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(child, fn) for key, child in tree.items()}
    return tree
