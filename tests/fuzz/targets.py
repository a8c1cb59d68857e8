"""What is fuzzed: each target takes one wrong input, made from a seed, and says what broke.

Nothing but a parser's documented error may come out, and no more memory may be taken than its
limits say.
"""

import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

from geotrain.transport.frame import (
    MAX_CHUNK_BYTES,
    MAX_CONTROL_BYTES,
    FrameHeader,
    FrameType,
    ProtocolError,
    control_frame,
    parse_header,
)
from geotrain.transport.hello import Hello, disagreement, read_refusal
from geotrain.transport.maps import pack, unpack
from geotrain.transport.messages import Message, Presence
from geotrain.transport.protocol import LaneProtocol
from geotrain.transport.reader import FrameReader
from geotrain.transport.records import (
    MAX_RECORD_BYTES,
    AttachRequest,
    RecordReader,
    encode_record,
    get_counts,
    get_seconds,
)
from geotrain.transport.sending import read_states
from geotrain.transport.transitions import State
from tests.fuzz.mutate import (
    Frame,
    cut_frames,
    join,
    mutate_bytes,
    mutate_frames,
    mutate_header,
    mutate_value,
    split,
    with_payload,
)
from tests.transport.lane_pair import RUN, VIEW, End, make_hello, make_pair, settle

MOST_EXTRA_BYTES = 16 << 20
"""What reading one record, or a stream of frames, may have live beside what it is given."""
_TRACED_SHARE = 0.02
"""Of the cases: watching the memory makes one many times slower."""


def case(target: Callable[[Random], None], number: int) -> None:
    """Run one case of a target; AssertionError or the stray exception names nothing more."""
    rng = Random(f"{target.__name__} {number}")
    if rng.random() >= _TRACED_SHARE:
        target(rng)
        return
    tracemalloc.start()
    try:
        target(rng)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MOST_EXTRA_BYTES, f"{peak_bytes} bytes at its peak"


def _several(rng: Random) -> int:
    return rng.choice((1, 1, 1, 2, 5))


# Single parsers ----------------------------------------------------------------------------------


def header(rng: Random) -> None:
    valid = FrameHeader(type=rng.choice(list(FrameType)), payload_length=64, raw_length=64)
    for _ in range(_several(rng)):
        valid = mutate_header(valid, rng)
    data = valid.pack()
    if rng.random() < 0.5:
        data = (mutate_bytes(data, rng) + bytes(len(data)))[: len(data)]
    try:
        parsed = parse_header(data)
    except ProtocolError:
        return
    assert parsed.payload_length <= MAX_CHUNK_BYTES and parsed.raw_length <= 2**32
    assert parsed.type is not FrameType.CHUNK or 0 < parsed.raw_length <= MAX_CHUNK_BYTES


_MESSAGE = Message(
    stream=1,
    view=VIEW,
    seq=3,
    kind="forward",
    step=2,
    microbatch=1,
    part=1,
    num_parts=3,
    header=b"h",
    payload_bytes=900,
    hints=((0, 100), (200, 300)),
)
_PRESENCE = Presence(
    region="b",
    incarnation=5,
    revision=2,
    state="ready",
    identity={"fingerprint": "x", "versions": {"torch": "2"}},
    rings={0: 4096, 3: 0},
    error={"region": "b", "kind": "lost", "detail": "gone"},
    note="silent",
)
_REFUSAL = {"reason": "run.seed differs", "differing": [["run.seed", 1, 2], ["run.x", None, "y"]]}
_RESUME = {
    "streams": {
        0: {"expected": 9, "released": [[0, 4], [6, 8]], "incomplete": [[5, [[0, 64], [128, 256]]]]}
    }
}
_ATTACH = AttachRequest(
    proto=1,
    version="0",
    run_hash="h",
    region="a",
    rank=0,
    world_size=1,
    pid=7,
    arena_bytes=1 << 20,
    rings={(0, "in"): (0, 4096), (1, "out"): (4096, 8192)},
)


def _read_hello(record: dict[Any, Any]) -> None:
    disagreement(make_hello("a"), Hello.from_map(record))


_RECORDS: tuple[tuple[dict[Any, Any], Callable[[dict[Any, Any]], object]], ...] = (
    (_MESSAGE.to_map(with_start=True), lambda record: Message.from_map(record, with_start=True)),
    (_PRESENCE.to_map(), Presence.from_map),
    (make_hello("b", run={**RUN, "plan": {"window": [3, 1]}}).to_map(), _read_hello),
    (_REFUSAL, read_refusal),
    (_RESUME, read_states),
    (_ATTACH.to_record(), AttachRequest.from_record),
    ({"seqs": [1, 2, 3], "view": 1}, lambda record: get_counts(record, "seqs")),
    ({"age_s": 1.5}, lambda record: get_seconds(record, "age_s")),
)


def record(rng: Random) -> None:
    """Maps: through msgpack, as a peer's would come, into whatever reads them."""
    valid, read = rng.choice(_RECORDS)
    changed: Any = valid
    for _ in range(_several(rng)):
        changed = mutate_value(changed, rng)
    try:
        data = pack(changed)
    except (ValueError, OverflowError):
        return  # more than msgpack can say
    if rng.random() < 0.2:
        data = mutate_bytes(data, rng)
    try:
        read(unpack(data, MAX_CONTROL_BYTES))
    except ValueError:
        return


def attachment(rng: Random) -> None:
    """The stream of records between a rank and its daemon."""
    stream = b""
    for _ in range(rng.randint(1, 4)):
        valid, _ = rng.choice(_RECORDS)
        changed = {"type": "send", "message": mutate_value(valid, rng)}
        try:
            stream += encode_record(changed)
        except (ValueError, OverflowError):
            continue
    for _ in range(rng.choice((0, 1, 3))):
        stream = mutate_bytes(stream, rng)
    reader = RecordReader()
    try:
        for piece in split(stream, rng):
            for read in reader.feed(piece):
                assert isinstance(read["type"], str)
            assert len(reader._buffer) <= MAX_RECORD_BYTES + 4 + len(piece)
    except ValueError:
        return


def reader(rng: Random) -> None:
    """Frames alone: where bytes go, and never more than was allowed."""
    stream = join([_control(rng) for _ in range(rng.randint(1, 6))])
    for _ in range(rng.choice((0, 1, 1, 3))):
        stream = mutate_bytes(stream, rng)
    made: list[int] = []

    def place(header: FrameHeader) -> memoryview | None:
        if rng.random() < 0.2:
            return None
        made.append(header.payload_length)
        return memoryview(bytearray(header.payload_length))

    frames = FrameReader(place)
    try:
        for piece in split(stream, rng):
            rest = memoryview(piece)
            while rest:
                room = frames.get_buffer()
                assert 0 < room.nbytes <= MAX_CHUNK_BYTES
                taken = min(room.nbytes, rest.nbytes)
                room[:taken] = rest[:taken]
                rest = rest[taken:]
                frames.buffer_updated(taken)
    except ProtocolError:
        pass
    assert all(size <= MAX_CHUNK_BYTES for size in made)


def _control(rng: Random) -> Frame:
    kind = rng.choice([FrameType.BOARD, FrameType.ACK, FrameType.MESSAGE, FrameType.RESUME])
    valid, _ = rng.choice(_RECORDS)
    frame = control_frame(kind, valid, stream=rng.randrange(4), view=VIEW, seq=rng.randrange(9))
    return cut_frames(frame, parse_header)[0]


# A lane ------------------------------------------------------------------------------------------


def lane(rng: Random) -> None:
    """What one side of a real conversation said, made wrong, to the other side."""
    a, b = make_pair()
    if rng.random() < 0.8:
        settle(a, b)
        for end in (a, b):
            for _ in range(rng.randint(0, 4)):
                end.offer(rng.randbytes(rng.choice((0, 5, 400, 1_000))), hinted=rng.random() < 0.5)
    if rng.random() < 0.5:
        while b.write(limit=300):
            pass
        a.read(len(b.out))
        a.release(next(iter(a.held))) if a.held else None
    while a.write(limit=300):
        pass
    frames = cut_frames(bytes(a.out), parse_header)
    frames += [_nonsense(rng) for _ in range(rng.choice((0, 0, 1, 3)))]
    for _ in range(_several(rng) if frames else 0):
        frames = mutate_frames(frames, rng) or frames
    _feed(b, join(frames), rng)
    # Whatever came, this side can still say what it has to, and end.
    while b.write(limit=300):
        pass
    assert b.lane is not None
    b.lane.connection_lost("over")
    assert b.lane.state is State.CLOSED


def _nonsense(rng: Random) -> Frame:
    """A frame that is well formed, of a map that may be anything."""
    head, _ = _control(rng)
    valid, _ = rng.choice(_RECORDS)
    try:
        payload = pack(mutate_value(valid, rng))
    except (ValueError, OverflowError):
        payload = b""
    return with_payload(head, payload, rng)


def _feed(end: End, data: bytes, rng: Random) -> None:
    assert end.lane is not None
    for piece in split(data, rng):
        _check_buffer(end.lane)
        end.feed(piece)
        while end.coded and rng.random() < 0.7:
            end.decode_one()


def _check_buffer(protocol: LaneProtocol) -> None:
    if protocol.state is not State.CLOSED:
        assert 0 < protocol.get_buffer().nbytes <= MAX_CHUNK_BYTES


TARGETS = (header, record, attachment, reader, lane)
