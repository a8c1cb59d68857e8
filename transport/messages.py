"""The records that regions exchange, and how a map from a peer is checked before it is believed.

Words: a *boundary* b lies between regions b and b + 1 of the line, a *stream* is one direction over
one boundary. Everything here is data; who sends what and when is in session.py and protocol.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from geotrain.transport.maps import differing_keys as differing_keys
from geotrain.transport.maps import get_bytes, get_int, get_map, get_pairs, get_str, is_int
from geotrain.transport.maps import pack as pack
from geotrain.transport.maps import unpack as unpack

FORWARD, BACKWARD = 0, 1

MAX_STREAM = 0xFFFF
MAX_U64 = 2**64 - 1
MAX_COUNT = 2**53
"""Above any step, sequence number or byte count; below where doubles round."""
MAX_HEADER_BYTES = 48 * 1024
MAX_INLINE_BYTES = 4 * 1024
MAX_HINTS = 64
MAX_PARTS = 65_536
MAX_KIND_CHARS = 32
MAX_NAME_CHARS = 64
MAX_NOTE_CHARS = 1_024
MAX_DETAIL_BYTES = 16 * 1024
"""Of a Presence's identity and of its error, each, packed."""
MAX_RINGS = 64
PRESENCE_STATES = ("absent", "attached", "ready", "left", "failed")


def stream_id(boundary: int, direction: int) -> int:
    """The stream over `boundary` in `direction` (FORWARD or BACKWARD)."""
    if direction not in (FORWARD, BACKWARD) or not 0 <= boundary <= MAX_STREAM // 2:
        raise ValueError(f"no stream for boundary {boundary}, direction {direction}")
    return 2 * boundary + direction


def boundary_of(stream: int) -> int:
    return stream // 2


def direction_of(stream: int) -> int:
    return stream % 2


def view_id(incarnations: Sequence[int]) -> int:
    """The name of one vector of incarnations, in region order; never 0."""
    packed = b"".join(incarnation.to_bytes(8, "little") for incarnation in incarnations)
    return xxhash.xxh3_64_intdigest(packed) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a stream, or one part of a message too big for a slot."""

    stream: int
    view: int
    seq: int
    """Counts from 0 per (view, stream)."""
    kind: str
    """Opaque to daemons; used in logs."""
    step: int
    microbatch: int
    """-1 where there is none. (step, microbatch) is the priority, oldest first."""
    part: int = 0
    num_parts: int = 1
    header: bytes = b""
    """Opaque to daemons."""
    payload_bytes: int = 0
    """Bytes in a ring slot; 0 means no slot."""
    start: int = 0
    """Offset of the slot in the *local* ring; never sent between regions."""
    inline: bytes = b""
    """A small payload that rides in the record; only where payload_bytes is 0."""
    hints: tuple[tuple[int, int], ...] = ()
    """(offset, length) ranges of the payload, ascending, where lossless coding may pay."""

    def __post_init__(self) -> None:
        _check_range("stream", self.stream, 0, MAX_STREAM)
        _check_range("view", self.view, 1, MAX_U64)
        _check_range("seq", self.seq, 0, MAX_COUNT)
        _check_length("kind", self.kind, MAX_KIND_CHARS, at_least=1)
        _check_range("step", self.step, -1, MAX_COUNT)
        _check_range("microbatch", self.microbatch, -1, MAX_COUNT)
        _check_range("num_parts", self.num_parts, 1, MAX_PARTS)
        _check_range("part", self.part, 0, self.num_parts - 1)
        _check_length("header", self.header, MAX_HEADER_BYTES)
        _check_range("payload_bytes", self.payload_bytes, 0, MAX_COUNT)
        _check_range("start", self.start, 0, MAX_COUNT)
        _check_length("inline", self.inline, MAX_INLINE_BYTES)
        if self.inline and self.payload_bytes:
            raise ValueError("a message has a slot or an inline payload, not both")
        if self.hints:
            _check_hints(self.hints, self.payload_bytes)

    @property
    def priority(self) -> tuple[int, int, int]:
        """Smaller goes first."""
        return (self.step, self.microbatch, self.seq)

    def to_map(self, *, with_start: bool = False) -> dict[str, Any]:
        """As a msgpack-able map; `start` only on the attachment, where it means something."""
        record: dict[str, Any] = {
            "stream": self.stream,
            "view": self.view,
            "seq": self.seq,
            "kind": self.kind,
            "step": self.step,
            "microbatch": self.microbatch,
        }
        if self.num_parts != 1:
            record["part"], record["num_parts"] = self.part, self.num_parts
        if self.header:
            record["header"] = self.header
        if self.payload_bytes:
            record["payload_bytes"] = self.payload_bytes
        if self.inline:
            record["inline"] = self.inline
        if self.hints:
            record["hints"] = [[offset, length] for offset, length in self.hints]
        if with_start:
            record["start"] = self.start
        return record

    @classmethod
    def from_map(cls, record: Mapping[Any, Any], *, with_start: bool = False) -> "Message":
        """Read a peer's map; unknown keys are ignored.

        Raises:
            ValueError: A key is missing, of the wrong type or out of its limits; names it.
        """
        return cls(
            stream=get_int(record, "stream"),
            view=get_int(record, "view"),
            seq=get_int(record, "seq"),
            kind=get_str(record, "kind"),
            step=get_int(record, "step"),
            microbatch=get_int(record, "microbatch"),
            part=get_int(record, "part", 0),
            num_parts=get_int(record, "num_parts", 1),
            header=get_bytes(record, "header", b""),
            payload_bytes=get_int(record, "payload_bytes", 0),
            start=get_int(record, "start", 0) if with_start else 0,
            inline=get_bytes(record, "inline", b""),
            hints=get_pairs(record, "hints", MAX_HINTS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What the line knows of one region: its entry on the board."""

    region: str
    incarnation: int = 0
    """Given by the region's daemon to each attach of its rank; greater is newer."""
    revision: int = 0
    """Counts changes within one incarnation."""
    state: str = "absent"
    identity: Mapping[str, Any] | None = None
    """What `ready` carried (fingerprint, versions); compared by ranks."""
    rings: Mapping[int, int] = field(default_factory=dict)
    """Stream -> capacity in bytes of this region's in-ring."""
    error: Mapping[str, Any] | None = None
    """`RegionError.to_record()` where the state is "failed"."""
    note: str = ""
    """For people: "silent for 12 s in 1F3 of step 7"."""

    def __post_init__(self) -> None:
        _check_length("region", self.region, MAX_NAME_CHARS, at_least=1)
        _check_range("incarnation", self.incarnation, 0, MAX_COUNT)
        _check_range("revision", self.revision, 0, MAX_COUNT)
        if self.state not in PRESENCE_STATES:
            raise ValueError(f"state is none of {', '.join(PRESENCE_STATES)}: {self.state[:32]!r}")
        _check_length("note", self.note, MAX_NOTE_CHARS)
        if len(self.rings) > MAX_RINGS:
            raise ValueError(f"{len(self.rings)} rings, at most {MAX_RINGS}")
        for stream, capacity in self.rings.items():
            _check_range("rings: stream", stream, 0, MAX_STREAM)
            _check_range("rings: capacity", capacity, 0, MAX_COUNT)

    @property
    def rank(self) -> tuple[int, int]:
        """Of two entries for one region the one of greater rank holds."""
        return (self.incarnation, self.revision)

    def to_map(self) -> dict[str, Any]:
        return {
            "region": self.region,
            "incarnation": self.incarnation,
            "revision": self.revision,
            "state": self.state,
            "identity": None if self.identity is None else dict(self.identity),
            "rings": dict(self.rings),
            "error": None if self.error is None else dict(self.error),
            "note": self.note,
        }

    @classmethod
    def from_map(cls, record: Mapping[Any, Any]) -> "Presence":
        """Read a peer's map; unknown keys are ignored.

        Raises:
            ValueError: A key is missing, of the wrong type or out of its limits; names it.
        """
        rings = get_map(record, "rings", {})
        assert rings is not None
        for stream, capacity in rings.items():
            if not is_int(stream) or not is_int(capacity):
                raise ValueError("rings: must map stream numbers to bytes")
        return cls(
            region=get_str(record, "region"),
            incarnation=get_int(record, "incarnation", 0),
            revision=get_int(record, "revision", 0),
            state=get_str(record, "state", "absent"),
            identity=_get_detail(record, "identity"),
            rings=rings,
            error=_get_detail(record, "error"),
            note=get_str(record, "note", ""),
        )


def _get_detail(record: Mapping[Any, Any], key: str) -> dict[Any, Any] | None:
    detail = get_map(record, key, None)
    if detail is not None and len(pack(detail)) > MAX_DETAIL_BYTES:
        raise ValueError(f"{key}: more than {MAX_DETAIL_BYTES} bytes")
    return detail


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: must be {low} to {high}, got {value}")


def _check_length(name: str, value: str | bytes, limit: int, *, at_least: int = 0) -> None:
    if not at_least <= len(value) <= limit:
        raise ValueError(f"{name}: must be {at_least} to {limit} long, got {len(value)}")


def _check_hints(hints: tuple[tuple[int, int], ...], payload_bytes: int) -> None:
    if len(hints) > MAX_HINTS:
        raise ValueError(f"hints: {len(hints)} ranges, at most {MAX_HINTS}")
    end = 0
    for offset, length in hints:
        if offset < end or length < 1 or offset + length > payload_bytes:
            raise ValueError("hints: must be ascending ranges within the payload")
        end = offset + length


def printable(text: str) -> str:
    """A peer's words, fit for one line of a log: nothing in them ends it or moves a cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)
