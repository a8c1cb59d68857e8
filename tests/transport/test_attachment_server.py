"""The daemon's end of an attachment: whatever a rank sends, the daemon lives on."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.transport.arena import IN, OUT, PAGE_BYTES, Arena
from geotrain.transport.records import ATTACHMENT_PROTO, AttachRequest, RecordReader, encode_record
from tests.transport.local_line import TIMEOUT_S, LocalLine, local_line, wait_for_state

FORWARD, BACKWARD = 0, 1


@pytest.fixture
def line(tmp_path: Path) -> Iterator[LocalLine]:
    with local_line(tmp_path, 2) as line:
        yield line


def dial(line: LocalLine, index: int = 0) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    sock.connect(str(line.socket_path(index)))
    return sock


def read_to_end(sock: socket.socket) -> list[dict[str, Any]]:
    reader, records = RecordReader(), []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            records += reader.feed(data)
    return records


def attach_request(**changes: Any) -> AttachRequest:
    rings = {(BACKWARD, IN): (0, PAGE_BYTES), (FORWARD, OUT): (PAGE_BYTES, PAGE_BYTES)}
    fields: dict[str, Any] = {
        "proto": ATTACHMENT_PROTO,
        "version": "1.0",
        "run_hash": "hash",
        "region": "a",
        "rank": 0,
        "world_size": 1,
        "pid": os.getpid(),
        "arena_bytes": 2 * PAGE_BYTES,
        "rings": rings,
    }
    return AttachRequest(**{**fields, **changes})


def raw_attach(line: LocalLine) -> socket.socket:
    sock = dial(line)
    arena, fd = Arena.create(2 * PAGE_BYTES)
    socket.send_fds(sock, [encode_record(attach_request().to_record())], [fd])
    os.close(fd)
    arena.close()
    return sock


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


OVERLAPPING = {(BACKWARD, IN): (0, 2 * PAGE_BYTES), (FORWARD, OUT): (PAGE_BYTES, PAGE_BYTES)}
OUTSIDE = {(BACKWARD, IN): (0, PAGE_BYTES), (FORWARD, OUT): (PAGE_BYTES, 2 * PAGE_BYTES)}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rings": OVERLAPPING}, "overlaps"),
        ({"rings": OUTSIDE}, "outside"),
        ({"arena_bytes": 4 * PAGE_BYTES}, "not the 16384 announced"),
    ],
)
def test_an_arena_that_is_not_what_it_is_said_to_be_is_refused(
    line: LocalLine, changes: dict[str, Any], complaint: str
) -> None:
    with dial(line) as sock:
        arena, fd = Arena.create(2 * PAGE_BYTES)
        record = encode_record(attach_request(**changes).to_record())
        socket.send_fds(sock, [record], [fd])
        os.close(fd)
        arena.close()
        (refused,) = read_to_end(sock)
        assert refused["type"] == "refused"
        assert complaint in refused["reason"]


def test_an_attach_without_a_sealed_arena_is_refused(line: LocalLine) -> None:
    with dial(line) as sock:
        sock.sendall(encode_record(attach_request().to_record()))
        (refused,) = read_to_end(sock)
        assert "0 descriptors" in refused["reason"]
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, 2 * PAGE_BYTES)
    with dial(line) as sock:
        socket.send_fds(sock, [encode_record(attach_request().to_record())], [fd])
        (refused,) = read_to_end(sock)
        assert "not sealed" in refused["reason"]
    os.close(fd)
    line.attach(0).close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        framed(b"\xc1"),
        framed(b"\x93\x01\x02\x03"),
        framed(b"\x80"),
        encode_record({"type": "no such thing"}),
        encode_record({"type": "beat", "action": 7}),
        encode_record({"type": "beat", "action": "x", "age_s": float("nan"), "step": 0}),
        encode_record({"type": "send", "message": {"stream": 0}}),
        encode_record({"type": "ready", "identity": {"too much": "x" * 20_000}}),
        encode_record({"type": "release", "stream": 0, "view": 1, "seqs": [0]}),
        encode_record({"type": "release", "stream": 1, "view": 1, "seqs": [-1]}),
        encode_record({"type": "release", "stream": 99, "view": 1, "seqs": []}),
    ],
)
def test_garbage_closes_that_attachment_with_a_reason_and_nothing_else(
    line: LocalLine, garbage: bytes
) -> None:
    with contextlib.closing(line.attach(1)) as b:
        with raw_attach(line) as sock:
            sock.sendall(garbage)
            last = read_to_end(sock)[-1]
        assert last["type"] == "refused"
        assert "sent a bad record" in last["reason"]
        entry = wait_for_state(b, "a", "failed")
        assert entry.error is not None
        assert entry.error["kind"] == "lost"
        assert "sent a bad record" in entry.error["detail"]
        with contextlib.closing(line.attach(0)):
            wait_for_state(b, "a", "attached")


@pytest.mark.parametrize(
    ("start", "payload_bytes"), [(PAGE_BYTES - 8, 16), (2**52, 8), (0, 2**52), (0, PAGE_BYTES + 1)]
)
def test_a_slot_outside_the_ring_closes_the_attachment(
    line: LocalLine, start: int, payload_bytes: int
) -> None:
    message = {"stream": 0, "view": 1, "seq": 0, "kind": "x", "step": 0, "microbatch": 0}
    message |= {"payload_bytes": payload_bytes, "start": start}
    with raw_attach(line) as sock:
        sock.sendall(encode_record({"type": "send", "message": message}))
        assert "outside the out-ring of stream 0" in read_to_end(sock)[-1]["reason"]
    line.attach(0).close()


@given(junk=st.binary(max_size=300), cuts=st.integers(1, 50))
def test_random_bytes_are_records_or_a_value_error(junk: bytes, cuts: int) -> None:
    reader = RecordReader()
    with contextlib.suppress(ValueError):
        for at in range(0, len(junk), cuts):
            reader.feed(junk[at : at + cuts])


@given(
    records=st.lists(st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3)),
    cuts=st.integers(1, 40),
)
def test_records_may_be_split_anywhere(records: list[dict[str, Any]], cuts: int) -> None:
    records = [{**record, "type": "x"} for record in records]
    data = b"".join(encode_record(record) for record in records)
    reader, read = RecordReader(), []
    for at in range(0, len(data), cuts):
        read += reader.feed(data[at : at + cuts])
    assert read == records


def test_a_record_too_large_for_the_other_end_is_refused_at_home() -> None:
    with pytest.raises(ValueError, match="allowed 65536"):
        encode_record({"type": "x", "data": bytes(65536)})
