import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.transport.events import ViewFailed
from geotrain.transport.frame import FrameType, ProtocolError, control_frame, parse_header
from geotrain.transport.messages import Message, Presence
from geotrain.transport.session import Session
from geotrain.transport.transitions import State
from tests.transport.lane_pair import (
    RING_BYTES,
    VIEW,
    End,
    connect,
    disconnect,
    make_pair,
    settle,
    shake_hands,
)

OPS = ["offer"] * 2 + ["write"] * 6 + ["read"] * 4 + ["decode"] * 2 + ["release", "cut"]


def _payload(rng: random.Random) -> bytes:
    size = rng.choice([0, 5, 16, 17, 64, 300, 1000, 2500, RING_BYTES])
    return rng.randbytes(size) if rng.random() < 0.5 else bytes([rng.randrange(256)]) * size


def _apply(a: End, b: End, op: str, end: End, number: int, rng: random.Random) -> None:
    if op == "offer":
        end.offer(_payload(rng), hinted=bool(number % 2), microbatch=number % 3)
    elif op == "write":
        end.write(limit=1 + number % 700)
    elif op == "read":
        end.read(1 + number % 900)
    elif op == "decode":
        end.decode_one()
    elif op == "release" and end.held:
        end.release(sorted(end.held)[number % len(end.held)])
    elif op == "cut":
        disconnect(a, b)
        connect(a, b)
        if number % 4:  # else the next cut may fall into the handshake
            shake_hands(a, b)


@given(st.integers(0, 2**32), st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_every_message_arrives_once_in_order_bit_equal_whatever_interleaves(seed, num_ops):
    rng = random.Random(seed)
    a, b = make_pair()
    shake_hands(a, b)
    for _ in range(num_ops):
        _apply(a, b, rng.choice(OPS), rng.choice([a, b]), rng.randrange(2**16), rng)
    settle(a, b, release=True)
    for sender, receiver in ((a, b), (b, a)):
        assert receiver.delivered == list(enumerate(sender.offered))
        assert sorted(sender.acked) == list(range(len(sender.offered)))
        assert sender.session.messages_sent == len(sender.offered)


def test_nothing_is_sent_before_the_peer_has_opened_the_view():
    a, b = make_pair(views=False)
    a.open_view()
    a.offer(b"x" * 100)
    settle(a, b)
    assert b.delivered == []
    b.open_view()
    settle(a, b)
    assert b.delivered == [(0, b"x" * 100)]


def test_a_chunk_of_a_view_closed_in_its_middle_is_drained_and_memory_left_alone():
    a, b = make_pair()
    settle(a, b)
    a.offer(b"x" * 1000)
    while a.write(limit=1000):
        pass
    b.read(len(a.out) - 500)
    b.session.close_view()
    assert b.lane is not None
    b.lane.drain_chunk()
    b.ring[:] = bytes(RING_BYTES)
    settle(a, b)
    assert bytes(b.ring) == bytes(RING_BYTES)
    assert b.lane.close_reason == ""


@pytest.mark.parametrize("arrived", range(1, 120, 7))
def test_a_view_may_close_while_any_frame_is_half_in(arrived):
    a, b = make_pair()
    settle(a, b)
    a.board.append(Presence(region="a", revision=3))
    a.offer(b"small")
    a.offer(b"x" * 200)
    assert a.lane is not None and b.lane is not None
    a.lane.publish(a.board)
    while a.write():
        pass
    b.read(arrived)
    b.session.close_view()
    b.lane.drain_chunk()
    settle(a, b)
    assert b.lane.state is State.OPEN, b.lane.close_reason


def test_a_closed_lane_writes_nowhere_any_more():
    a, b = make_pair()
    settle(a, b)
    a.offer(b"x" * 1000)
    while a.write(limit=1000):
        pass
    b.read(len(a.out) - 500)
    assert b.lane is not None
    b.lane.close("enough")
    before = bytes(b.ring)
    while a.out:
        room = b.lane.get_buffer()
        taken = min(len(room), len(a.out))
        room[:taken] = a.out[:taken]
        del a.out[:taken]
        b.lane.buffer_updated(taken, now=0.0)
    assert bytes(b.ring) == before


def test_payload_is_counted_as_it_was_before_coding_and_again_when_sent_again():
    a, b = make_pair()
    settle(a, b)
    for payload in (bytes(1000), b"x" * 600, b"inline"):
        a.offer(payload, hinted=True)
    settle(a, b)
    assert a.session.payload_bytes_sent == 1600
    assert b.session.payload_bytes_sent == 0
    a.offer(b"y" * 300)
    while a.write(limit=1000):
        pass
    disconnect(a, b)  # nothing of it has been read
    connect(a, b)
    settle(a, b)
    assert b.delivered[-1] == (3, b"y" * 300)
    assert a.session.payload_bytes_sent == 1600 + 2 * 300


def test_sender_stops_at_the_credit_of_the_ring_and_goes_on_at_release():
    a, b = make_pair()
    for _ in range(3):
        a.offer(b"x" * (RING_BYTES // 2))
    settle(a, b)
    assert [seq for seq, _ in b.delivered] == [0, 1]
    b.release(0)
    settle(a, b)
    assert [seq for seq, _ in b.delivered] == [0, 1, 2]
    assert a.acked == [0]


def test_sender_stops_at_1024_unreleased_messages():
    a, b = make_pair()
    for _ in range(1025):
        a.offer(b"")
    settle(a, b)
    assert len(b.delivered) == 1024
    b.release(7)
    settle(a, b)
    assert len(b.delivered) == 1025


def _header_frame(seq: int, payload_bytes: int) -> tuple[bytes, Message]:
    message = Message(
        stream=0,
        view=VIEW,
        seq=seq,
        kind="x",
        step=0,
        microbatch=0,
        payload_bytes=payload_bytes,
    )
    frame = control_frame(FrameType.MESSAGE, message.to_map(), stream=0, view=VIEW, seq=seq)
    return frame, message


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([(0, RING_BYTES + 1)], "without credit"),
        ([(0, RING_BYTES), (1, 1)], "without credit"),
        ([(1, 1)], "expected 0"),
        ([(i, 0) for i in range(1025)], "1024 are not released"),
    ],
)
def test_header_without_credit_is_a_protocol_error(frames, reason):
    a, b = make_pair()
    settle(a, b)
    for seq, size in frames:
        a.out += _header_frame(seq, size)[0]
    b.read(len(a.out))
    assert reason in b.closed_because()


def test_ack_of_a_message_that_is_not_out_is_a_protocol_error():
    a, b = make_pair()
    settle(a, b)
    b.out += control_frame(FrameType.ACK, {"seqs": [0]}, stream=0, view=VIEW)
    a.read(len(b.out))
    assert "ACK of message 0" in a.closed_because()


def test_resume_that_contradicts_what_was_acknowledged_fails_the_view():
    a, b = make_pair()
    a.offer(b"hello")
    settle(a, b, release=True)
    assert a.acked == [0]
    disconnect(a, b)
    b.session = Session()
    b.open_view()
    connect(a, b)
    settle(a, b)
    failed = [event for event in a.events if isinstance(event, ViewFailed)]
    assert failed and "lost the state" in failed[0].reason


def test_failed_checksum_is_asked_for_twice_then_the_view_fails():
    a, b = make_pair()
    settle(a, b)
    a.corrupt_next = True
    a.offer(b"x" * 100)
    settle(a, b)
    failed = [event for event in b.events if isinstance(event, ViewFailed)]
    assert failed and "failed its checksum 3 times" in failed[0].reason
    assert b.delivered == []


def test_failed_checksum_once_is_healed():
    a, b = make_pair()
    settle(a, b)
    a.offer(b"x" * 100)
    a.corrupt_next = True
    while a.write():
        pass
    a.corrupt_next = False
    settle(a, b)
    assert b.delivered == [(0, b"x" * 100)]


def test_damaged_coded_chunk_comes_again_raw():
    a, b = make_pair()
    settle(a, b)
    a.offer(b"x" * 1000, hinted=True)
    a.corrupt_next = True
    while a.write():
        pass
    a.corrupt_next = False
    settle(a, b)
    assert b.delivered == [(0, b"x" * 1000)]


def test_oldest_microbatch_goes_first():
    a, b = make_pair()
    settle(a, b)
    a.offer(b"x" * 1000, microbatch=5)
    a.offer(b"y" * 1000, microbatch=2)
    order = []
    while a.write(limit=500):
        header = parse_header(a.out[:48])
        if header.type is FrameType.CHUNK:
            order.append(header.seq)
        a.out.clear()
    assert order == [1, 1, 0, 0]


def test_what_arrived_before_a_cut_is_not_sent_again():
    a, b = make_pair()
    settle(a, b)
    a.offer(b"x" * 1000)
    for _ in range(3):  # the header, two chunks
        a.write(limit=300)
    b.read(len(a.out) - 1)  # the second chunk lacks its last byte and does not count
    disconnect(a, b)
    connect(a, b)
    settle(a, b)
    assert b.delivered == [(0, b"x" * 1000)]
    b.release(0)
    settle(a, b)
    wire_bytes = next(event.wire_bytes for event in a.events if hasattr(event, "wire_bytes"))
    assert wire_bytes[0] < 300 + 300 + 700 + 5 * 48 + 150


def test_offer_and_release_name_what_is_wrong():
    a, b = make_pair()
    settle(a, b)
    with pytest.raises(ValueError, match="expected 0"):
        a.session.offer(_header_frame(3, 0)[1], None)
    with pytest.raises(ValueError, match="ring holds 4096"):
        a.session.offer(_header_frame(0, 5000)[1], memoryview(bytes(5000)))
    with pytest.raises(ValueError, match="not held"):
        b.session.release(0, VIEW, [0])
    with pytest.raises(ValueError, match="no stream 9"):
        b.session.release(9, VIEW, [0])
    b.session.release(0, VIEW + 1, [0])  # of another view: nothing


def test_chunk_for_no_message_is_a_protocol_error():
    a, _ = make_pair()
    settle(a, _)
    header = parse_header(control_frame(FrameType.NAK, view=VIEW, stream=1, seq=3, raw_length=5))
    with pytest.raises(ProtocolError, match="before its header"):
        a.session.place(header)
