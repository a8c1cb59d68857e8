import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.transport.frame import (
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CONTROL_BYTES,
    RAW,
    ZSTD,
    FrameHeader,
    FrameType,
    ProtocolError,
    chunk_header,
    control_frame,
    parse_header,
)


def _chunk(**changes: int) -> bytes:
    fields = {"payload_length": 10, "raw_length": 10, "coding": RAW}
    return FrameHeader(type=FrameType.CHUNK, **{**fields, **changes}).pack()


def test_header_is_48_little_endian_bytes():
    frame = control_frame(FrameType.PING, seq=0x0102)
    assert len(frame) == HEADER_BYTES == 48
    assert frame[0] == FrameType.PING
    assert frame[16:24] == b"\x02\x01\0\0\0\0\0\0"


def test_chunk_header_survives():
    raw = memoryview(b"0123456789")
    header = parse_header(chunk_header(stream=3, view=2**64 - 1, seq=5, raw_offset=70, raw=raw))
    assert (header.stream, header.view, header.seq) == (3, 2**64 - 1, 5)
    assert (header.raw_offset, header.raw_length, header.coding) == (70, 10, RAW)
    assert header.checksum == header.checksum_of(raw)


@pytest.mark.parametrize("field", ["stream", "view", "seq", "raw_offset"])
def test_checksum_fails_for_a_chunk_in_another_place(field):
    place = {"stream": 1, "view": 2, "seq": 3, "raw_offset": 4}
    here = FrameHeader(type=FrameType.CHUNK, **place)
    there = FrameHeader(type=FrameType.CHUNK, **{**place, field: place[field] + 1})
    assert here.checksum_of(b"bytes") != there.checksum_of(b"bytes")


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * HEADER_BYTES,
        b"\xff" * HEADER_BYTES,
        _chunk(raw_length=0, payload_length=0),
        _chunk(raw_length=MAX_CHUNK_BYTES + 1, payload_length=10, coding=ZSTD),
        _chunk(payload_length=9),
        _chunk(coding=ZSTD),
        _chunk(coding=2, payload_length=5),
        _chunk(payload_length=2**32 - 1, raw_length=2**32 - 1),
        FrameHeader(type=FrameType.PING, payload_length=1, raw_length=1).pack(),
        FrameHeader(type=FrameType.MESSAGE, payload_length=65537, raw_length=65537).pack(),
        FrameHeader(type=FrameType.HELLO, payload_length=5, raw_length=6).pack(),
        FrameHeader(type=FrameType.HELLO, payload_length=5, raw_length=5, coding=ZSTD).pack(),
    ],
)
def test_sizes_beyond_their_limits_are_refused_in_the_header(data):
    with pytest.raises(ProtocolError):
        parse_header(data)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_48_bytes_parse_or_are_a_protocol_error(data):
    try:
        header = parse_header(data)
    except ProtocolError:
        return
    assert header.payload_length <= max(MAX_CHUNK_BYTES, MAX_CONTROL_BYTES)
    assert header.pack() == data


def test_control_frame_too_large_for_the_peer_is_our_error():
    with pytest.raises(ValueError, match="at most"):
        control_frame(FrameType.CLOSE, {"reason": "x" * MAX_CONTROL_BYTES})
