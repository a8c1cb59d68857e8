"""Maps between peers: packed as msgpack, and read without believing a word of them.

Whatever a peer sends passes `unpack` (sizes, depth, types) and then the getters (key by key); both
raise nothing but ValueError.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgpack

MAX_ITEMS = 2_048
"""Elements of one array or map: bounds what a length field alone can make us allocate."""
MAX_DEPTH = 12


def pack(record: Mapping[Any, Any]) -> bytes:
    """A map as msgpack; the reader is `unpack`."""
    packed: bytes = msgpack.packb(record, use_bin_type=True)
    return packed


def unpack(data: bytes | bytearray | memoryview, limit: int) -> dict[Any, Any]:
    """Read one msgpack map of at most `limit` bytes, exactly.

    Beyond `data` itself a hostile record makes at most a few MiB live while it is being read.

    Raises:
        ValueError: Not one map, too long, too deep, too many elements, or of a foreign type.
    """
    size = len(data)
    if size > limit:
        raise ValueError(f"a record of {size} bytes, at most {limit}")
    try:
        record = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            use_list=True,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        # TypeError: a map or a list as the key of a map.
        raise ValueError(f"not a readable record: {exc}") from exc
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a map, got {type(record).__name__}")
    _check_plain(record)
    return record


def differing_keys(
    mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Where two maps differ: (dotted key, mine, theirs); None where a side has no such key."""
    differing: list[tuple[str, Any, Any]] = []
    _compare("", mine, theirs, differing)
    return differing


def _compare(key: str, mine: Any, theirs: Any, into: list[tuple[str, Any, Any]]) -> None:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for name in sorted({*mine, *theirs}, key=str):
            dotted = f"{key}.{name}" if key else str(name)
            _compare(dotted, mine.get(name), theirs.get(name), into)
    elif isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(mine) != len(theirs) or not any(isinstance(item, Mapping) for item in mine):
            if list(mine) != list(theirs):
                into.append((key, mine, theirs))
            return
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            _compare(f"{key}[{index}]", one, other, into)
    elif type(mine) is not type(theirs) or mine != theirs:
        into.append((key, mine, theirs))


_MISSING: Any = object()


def is_int(value: Any) -> bool:
    """Whether this is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def get_int(record: Mapping[Any, Any], key: str, default: Any = _MISSING) -> int:
    return int(_get(record, key, default, is_int, "an integer"))


def get_str(record: Mapping[Any, Any], key: str, default: Any = _MISSING) -> str:
    return str(_get(record, key, default, lambda value: isinstance(value, str), "a string"))


def get_bytes(record: Mapping[Any, Any], key: str, default: Any = _MISSING) -> bytes:
    return bytes(_get(record, key, default, lambda value: isinstance(value, bytes), "bytes"))


def get_list(record: Mapping[Any, Any], key: str, default: Any = _MISSING) -> list[Any]:
    return list(_get(record, key, default, lambda value: isinstance(value, list), "a list"))


def get_map(record: Mapping[Any, Any], key: str, default: Any = _MISSING) -> dict[Any, Any] | None:
    """The map under `key`; None only where the default is None and the key is missing or null."""
    if default is None and record.get(key) is None:
        return None
    return dict(_get(record, key, default, lambda value: isinstance(value, dict), "a map"))


def get_pairs(record: Mapping[Any, Any], key: str, limit: int) -> tuple[tuple[int, int], ...]:
    """A list of at most `limit` pairs of integers; empty where the key is missing."""
    pairs = get_list(record, key, [])
    if len(pairs) > limit:
        raise ValueError(f"{key}: {len(pairs)} pairs, at most {limit}")
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and is_int(pair[0]) and is_int(pair[1])):
            raise ValueError(f"{key}: must be pairs of integers")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _get(
    record: Mapping[Any, Any], key: str, default: Any, ok: Callable[[Any], bool], what: str
) -> Any:
    value = record.get(key, default)
    if value is _MISSING:
        raise ValueError(f"{key}: missing")
    if not ok(value):
        raise ValueError(f"{key}: must be {what}, got {type(value).__name__}")
    return value


def _check_plain(record: Any) -> None:
    """Refuse ext types, keys that are not str or int, and nesting beyond MAX_DEPTH."""
    todo: list[tuple[Any, int]] = [(record, 1)]
    while todo:
        value, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"a record nested deeper than {MAX_DEPTH}")
        if isinstance(value, dict):
            if not all(isinstance(key, str) or is_int(key) for key in value):
                raise ValueError("a record's keys must be strings or integers")
            todo.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            todo.extend((item, depth + 1) for item in value)
        elif not (value is None or isinstance(value, (bool, int, float, str, bytes))):
            raise ValueError(f"a record must not hold {type(value).__name__}")
