"""The records between a rank and its daemon: msgpack maps behind a length, read without a socket.

A record is a u32, little endian, and that many bytes of one msgpack map, at most 64 KiB. The key
`type` says what it is. Both ends read them with `RecordReader`; PROTOCOL.md lists them.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geotrain.transport.arena import IN, OUT, check_rings
from geotrain.transport.maps import get_int, get_list, get_str, is_int, pack, unpack

ATTACHMENT_PROTO = 2
MAX_RECORD_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")


def encode_record(record: Mapping[str, Any]) -> bytes:
    """One record as it goes over the socket.

    Raises:
        ValueError: The record is larger than the other end would accept.
    """
    body = pack(dict(record))
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(
            f"record {record.get('type')!r} of {len(body)} bytes, allowed {MAX_RECORD_BYTES}"
        )
    return _LENGTH.pack(len(body)) + body


class RecordReader:
    """Cuts a byte stream into records."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The records that `data` completes; it may be split anywhere.

        Raises:
            ValueError: Not a record, or a larger one than allowed. The stream is unusable then.
        """
        self._buffer += data
        records: list[dict[str, Any]] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_RECORD_BYTES:
                raise ValueError(f"a record of {length} bytes, allowed {MAX_RECORD_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[start + _LENGTH.size : end])
            record = unpack(body, MAX_RECORD_BYTES)
            if not isinstance(record.get("type"), str):
                raise ValueError("a record without a type")
            records.append(record)
            start = end
        del self._buffer[:start]
        return records


def get_count(record: Mapping[Any, Any], key: str) -> int:
    """An integer from 0 to 2**64 - 1; ValueError otherwise."""
    value = get_int(record, key)
    if value < 0:
        raise ValueError(f"{key}: must be >= 0, got {value}")
    return value


def get_counts(record: Mapping[Any, Any], key: str) -> list[int]:
    """A list of integers from 0 to 2**64 - 1; ValueError otherwise."""
    values = get_list(record, key)
    if not all(is_int(value) and value >= 0 for value in values):
        raise ValueError(f"{key}: must be integers >= 0")
    return values


def get_seconds(record: Mapping[Any, Any], key: str) -> float:
    """A finite number >= 0; ValueError otherwise."""
    value: Any = record.get(key)
    if not (is_int(value) or isinstance(value, float)) or not 0 <= value < 1e12:
        raise ValueError(f"{key}: must be a number of seconds")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """What a rank says of itself when it attaches."""

    proto: int
    version: str
    """The package's version; both ends must run the same."""
    run_hash: str
    """Hash of the canonical [run] section."""
    region: str
    rank: int
    world_size: int
    pid: int
    """As the rank sees it; the kernel's word (SO_PEERCRED) is what the daemon watches."""
    arena_bytes: int
    rings: dict[tuple[int, str], tuple[int, int]]
    resumes: int = 0
    """The incarnation that an earlier daemon gave this rank; 0 at the first attach."""

    def to_record(self) -> dict[str, Any]:
        rings = [[*key, *span] for key, span in self.rings.items()]
        fields = ("proto", "version", "run_hash", "region", "rank", "world_size", "pid", "resumes")
        record: dict[str, Any] = {name: getattr(self, name) for name in fields}
        return {"type": "attach", **record, "arena_bytes": self.arena_bytes, "rings": rings}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "AttachRequest":
        """Read a rank's first record.

        Raises:
            ValueError: Naming the field, or the ring that does not fit the arena.
        """
        if record.get("type") != "attach":
            raise ValueError(f"the first record is {record.get('type')!r}, not 'attach'")
        arena_bytes = get_count(record, "arena_bytes")
        rings = _parse_rings(record.get("rings"))
        check_rings(rings, arena_bytes)
        return cls(
            proto=get_count(record, "proto"),
            version=get_str(record, "version"),
            run_hash=get_str(record, "run_hash"),
            region=get_str(record, "region"),
            rank=get_count(record, "rank"),
            world_size=get_count(record, "world_size"),
            pid=get_count(record, "pid"),
            arena_bytes=arena_bytes,
            rings=rings,
            resumes=get_count(record, "resumes"),
        )


def _parse_rings(value: object) -> dict[tuple[int, str], tuple[int, int]]:
    if not isinstance(value, list) or len(value) > 64:
        raise ValueError("rings is not a list of at most 64 rings")
    rings: dict[tuple[int, str], tuple[int, int]] = {}
    for ring in value:
        if not isinstance(ring, list) or len(ring) != 4 or ring[1] not in (IN, OUT):
            raise ValueError("a ring is not [stream, 'in' | 'out', offset, capacity]")
        stream, direction, offset, capacity = ring
        if not all(is_int(number) and number >= 0 for number in (stream, offset, capacity)):
            raise ValueError("a ring with a stream, offset or capacity that is no count")
        if (stream, direction) in rings:
            raise ValueError(f"stream {stream} has two rings {direction!r}")
        rings[stream, direction] = (offset, capacity)
    return rings
