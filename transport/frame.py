"""Frames: the unit on the wire of a lane. One fixed header, then a payload (PROTOCOL.md, "Frames").

A header is believed only after `parse_header` compared every size in it with the limits here (P-1),
so nothing larger is ever allocated on a peer's word.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any

import xxhash

from geotrain.transport.maps import pack

PROTOCOL_VERSION = 2
HEADER_BYTES = 48
MAX_CHUNK_BYTES = 1 << 20
MAX_CONTROL_BYTES = 256 * 1024
MAX_MESSAGE_BYTES = 64 * 1024
"""Of a MESSAGE frame's map: the rank's header, an inline payload and the hints fit."""

MAX_JOIN_BYTES = 1_024

RAW, ZSTD = 0, 1


class FrameType(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    BOARD = 4
    RESUME = 5
    MESSAGE = 6
    CHUNK = 7
    ACK = 8
    NAK = 9
    PING = 10
    PONG = 11
    CLOSE = 12
    JOIN = 13
    JOINED = 14
    GONE = 15
    LANES = 16


class ProtocolError(Exception):
    """What a peer did that the protocol forbids; the lane closes with this text as its reason."""


_LAYOUT = Struct("<BBHIQQQIIQ")
assert _LAYOUT.size == HEADER_BYTES

_PAYLOAD_LIMITS: Mapping[FrameType, int] = {
    FrameType.HELLO: MAX_CONTROL_BYTES,
    FrameType.WELCOME: MAX_CONTROL_BYTES,
    FrameType.REFUSE: MAX_CONTROL_BYTES,
    FrameType.BOARD: MAX_CONTROL_BYTES,
    FrameType.RESUME: MAX_CONTROL_BYTES,
    FrameType.MESSAGE: MAX_MESSAGE_BYTES,
    FrameType.CHUNK: MAX_CHUNK_BYTES,
    FrameType.ACK: MAX_CONTROL_BYTES,
    FrameType.NAK: 0,
    FrameType.PING: 0,
    FrameType.PONG: 0,
    FrameType.CLOSE: MAX_CONTROL_BYTES,
    FrameType.JOIN: MAX_JOIN_BYTES,
    FrameType.JOINED: 0,
    FrameType.GONE: MAX_CONTROL_BYTES,
    FrameType.LANES: 0,
}
_MIX_SEQ, _MIX_OFFSET, _MIX_VIEW, _MIX_STREAM = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x27D4EB2F165667C5,
)
_MASK = 2**64 - 1
_TYPES = {int(kind): kind for kind in FrameType}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """One frame's header; which fields mean something depends on the type."""

    type: FrameType
    payload_length: int = 0
    """Bytes that follow on the wire."""
    coding: int = RAW
    stream: int = 0
    view: int = 0
    seq: int = 0
    raw_offset: int = 0
    """Of a chunk in its message's payload."""
    raw_length: int = 0
    """Bytes of the payload once decoded."""
    checksum: int = 0
    """`checksum_of` the decoded payload."""

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            self.type,
            self.coding,
            self.stream,
            self.payload_length,
            self.view,
            self.seq,
            self.raw_offset,
            self.raw_length,
            0,
            self.checksum,
        )

    def checksum_of(self, raw: bytes | bytearray | memoryview) -> int:
        return checksum(self.type, self.stream, self.view, self.seq, self.raw_offset, raw)

    def hasher(self) -> xxhash.xxh3_64:
        """What gives `checksum_of` for bytes that come in pieces."""
        seed = _seed(self.type, self.stream, self.view, self.seq, self.raw_offset)
        return xxhash.xxh3_64(seed=seed)


def checksum(
    kind: int,
    stream: int,
    view: int,
    seq: int,
    raw_offset: int,
    raw: bytes | bytearray | memoryview,
) -> int:
    """xxh3_64 of the raw payload, seeded by the place it is for.

    A chunk that ends up at another offset, message, stream or view than its own fails (P-4).
    """
    return xxhash.xxh3_64_intdigest(raw, seed=_seed(kind, stream, view, seq, raw_offset))


def _seed(kind: int, stream: int, view: int, seq: int, raw_offset: int) -> int:
    seed = (
        seq * _MIX_SEQ
        ^ raw_offset * _MIX_OFFSET
        ^ view * _MIX_VIEW
        ^ (stream << 8 | kind) * _MIX_STREAM
    )
    return seed & _MASK


def parse_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Read a header of exactly HEADER_BYTES and compare its sizes with the limits.

    Raises:
        ProtocolError: Unknown type or coding, or a size beyond its limit.
    """
    code, coding, stream, length, view, seq, offset, raw_length, reserved, checksum = (
        _LAYOUT.unpack(data)
    )
    kind = _TYPES.get(code)
    if kind is None or reserved:
        raise ProtocolError(f"not a frame of this protocol (type {code}, reserved {reserved})")
    if length > _PAYLOAD_LIMITS[kind]:
        raise ProtocolError(
            f"{kind.name} of {length} bytes, at most {_PAYLOAD_LIMITS[kind]} are allowed"
        )
    if kind is FrameType.CHUNK:
        _check_chunk(coding, length, raw_length)
    elif coding != RAW or (raw_length != length and kind is not FrameType.NAK):
        raise ProtocolError(f"{kind.name} must be raw (coding {coding}, {raw_length} != {length})")
    return FrameHeader(
        type=kind,
        payload_length=length,
        coding=coding,
        stream=stream,
        view=view,
        seq=seq,
        raw_offset=offset,
        raw_length=raw_length,
        checksum=checksum,
    )


def _check_chunk(coding: int, length: int, raw_length: int) -> None:
    if not 0 < raw_length <= MAX_CHUNK_BYTES:
        raise ProtocolError(f"CHUNK of {raw_length} raw bytes, must be 1 to {MAX_CHUNK_BYTES}")
    if coding == RAW:
        if length != raw_length:
            raise ProtocolError(f"raw CHUNK of {length} bytes for {raw_length}")
    elif coding != ZSTD or not 0 < length < raw_length:
        # A coding that does not shrink is sent raw, so this also bounds the receiver's scratch.
        raise ProtocolError(f"CHUNK of {length} bytes in coding {coding} for {raw_length}")


def control_frame(
    kind: FrameType,
    record: Mapping[Any, Any] | None = None,
    *,
    stream: int = 0,
    view: int = 0,
    seq: int = 0,
    raw_offset: int = 0,
    raw_length: int = 0,
) -> bytes:
    """A whole frame of any type but CHUNK; `record` becomes its payload.

    Raises:
        ValueError: The record is larger than a peer accepts.
    """
    payload = b"" if record is None else pack(record)
    if len(payload) > _PAYLOAD_LIMITS[kind]:
        raise ValueError(f"{kind.name} of {len(payload)} bytes, at most {_PAYLOAD_LIMITS[kind]}")
    header = FrameHeader(
        type=kind,
        payload_length=len(payload),
        stream=stream,
        view=view,
        seq=seq,
        raw_offset=raw_offset,
        raw_length=len(payload) or raw_length,
        checksum=checksum(kind, stream, view, seq, raw_offset, payload),
    )
    return header.pack() + payload


def nak_frame(chunk: FrameHeader) -> bytes:
    """Ask for the range of this chunk again (P-12)."""
    return control_frame(
        FrameType.NAK,
        stream=chunk.stream,
        view=chunk.view,
        seq=chunk.seq,
        raw_offset=chunk.raw_offset,
        raw_length=chunk.raw_length,
    )


def chunk_header(
    *,
    stream: int,
    view: int,
    seq: int,
    raw_offset: int,
    raw: memoryview,
    coded_length: int | None = None,
) -> bytes:
    """The header of one chunk; the bytes of `raw`, or its coded form, must follow it."""
    raw_length = len(raw)
    # Packed at once: this runs for every chunk.
    return _LAYOUT.pack(
        FrameType.CHUNK,
        RAW if coded_length is None else ZSTD,
        stream,
        raw_length if coded_length is None else coded_length,
        view,
        seq,
        raw_offset,
        raw_length,
        0,
        checksum(FrameType.CHUNK, stream, view, seq, raw_offset, raw),
    )
