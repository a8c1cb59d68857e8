"""Chunks over several lanes: P-17 to P-20 of PROTOCOL.md."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.transport.frame import FrameType, ProtocolError, chunk_header, control_frame
from geotrain.transport.lives import MAX_BULK_LANES, BulkLives
from geotrain.transport.transitions import State
from tests.transport.lane_pair import RING_BYTES, VIEW, shake_hands
from tests.transport.many_lanes import Lanes, LanesEnd

OPS = (
    ["offer"] * 2
    + ["control", "bulk"] * 5
    + ["read", "read_bulk", "read_bulk"] * 4
    + ["decode"] * 2
    + ["release", "reset", "half_reset", "open", "cut", "damage"]
)


def _payload(rng: random.Random) -> bytes:
    size = rng.choice([0, 5, 17, 300, 1000, 2500, RING_BYTES])
    return rng.randbytes(size) if rng.random() < 0.5 else bytes([rng.randrange(256)]) * size


def _apply(lanes: Lanes, op: str, end: LanesEnd, number: int, rng: random.Random) -> None:
    lane = rng.choice(lanes.numbers) if lanes.numbers else 0
    match op:
        case "offer":
            end.offer(_payload(rng), hinted=bool(number % 2), microbatch=number % 3)
        case "control":
            end.write_control(limit=1 + number % 700)
        case "bulk":
            end.write_bulk(lane, limit=1 + number % 700)
        case "read":
            end.read(1 + number % 900)
        case "read_bulk":
            end.read_bulk(lane, 1 + number % 900)
        case "decode":
            end.decode_one()
        case "damage" if lanes.num_damaged < 2:  # the third at one place would fail the view
            lanes.num_damaged += 1
            end.corrupt_next = True
            end.write_bulk(lane)
            end.corrupt_next = False
        case "release" if end.held:
            end.release(sorted(end.held)[number % len(end.held)])
        case "half_reset":
            # One end notices; what it wrote may still be under way, and arrive.
            end.drop_lane(lane)
        case "reset":
            for side in lanes.ends:
                side.drop_lane(lane)
        case "open" if len(lanes.numbers) < 5:
            lanes.open_lane()
        case "cut" if number % 5 == 0:
            lanes.cut_control()
            if number % 4:
                shake_hands(*lanes.ends)
    for side in lanes.ends:
        side.check()


@given(st.integers(0, 2**32), st.integers(0, 400), st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_doubled_or_written_late_whatever_becomes_of_the_lanes(
    seed, num_ops, num_lanes
):
    rng = random.Random(seed)
    lanes = Lanes(num_lanes)
    for _ in range(num_ops):
        _apply(lanes, rng.choice(OPS), rng.choice(lanes.ends), rng.randrange(2**16), rng)
    lanes.settle(release=True)
    for end in lanes.ends:
        assert end.lane.state is State.OPEN, end.lane.close_reason
        assert end.other.delivered == list(enumerate(end.offered))
        assert sorted(end.acked) == list(range(len(end.offered)))


def _sent_over(lanes: Lanes, number: int, payload: bytes, *, chunk: int) -> None:
    """Offer a message at a, its chunks all on one lane; nothing of them is read yet."""
    lanes.settle()
    lanes.a.offer(payload)
    while lanes.a.write_control():
        pass
    while lanes.a.write_bulk(number, limit=chunk):
        pass


def test_chunk_that_overtakes_its_message_waits_for_it():
    lanes = Lanes(1)
    _sent_over(lanes, 1, b"x" * 1000, chunk=400)
    lanes.b.read_bulk(1, 1 << 20)
    assert lanes.b.bulk[1].held and len(lanes.a.outs[1]) == 400 + 448 + 248
    lanes.b.read(1 << 20)
    assert not lanes.b.bulk[1].held
    lanes.settle()
    assert lanes.b.delivered == [(0, b"x" * 1000)]


def test_held_chunk_is_drained_when_its_view_closes():
    lanes = Lanes(1)
    _sent_over(lanes, 1, b"x" * 1000, chunk=400)
    lanes.b.read_bulk(1, 1 << 20)
    lanes.b.session.close_view()
    lanes.b.retry_held()
    lanes.b.read_bulk(1, 1 << 20)
    assert not lanes.a.outs[1]
    assert bytes(lanes.b.ring) == bytes(RING_BYTES)
    assert lanes.b.bulk[1].state is State.BULK


def test_dead_lane_has_only_what_it_lost_sent_again():
    lanes = Lanes(2)
    _sent_over(lanes, 1, b"x" * 4000, chunk=400)
    lanes.b.read(1 << 20)
    lanes.b.read_bulk(1, 5 * 448 + 200)  # five chunks and a half
    lanes.b.drop_lane(1)
    lanes.settle(release=True)
    assert lanes.b.delivered == [(0, b"x" * 4000)] and lanes.a.acked == [0]
    wire_bytes = next(event.wire_bytes for event in lanes.a.events if hasattr(event, "wire_bytes"))
    assert 4000 + 2000 < wire_bytes[0] < 4000 + 2000 + 20 * 48 + 150


def test_range_asked_for_again_is_on_its_new_lane_alone():
    lanes = Lanes(2)
    lanes.settle()
    lanes.a.offer(b"x" * 1000)
    lanes.a.write_control()
    lanes.a.corrupt_next = True
    lanes.a.write_bulk(1, limit=400)
    lanes.a.corrupt_next = False
    lanes.a.write_bulk(1, limit=600)
    lanes.b.read(1 << 20)
    lanes.b.read_bulk(1, 1 << 20)  # a NAK of the first 400
    lanes.b.write_control()
    lanes.a.read(1 << 20)
    lanes.a.write_bulk(2, limit=400)
    lanes.b.drop_lane(1)
    lanes.settle(release=True)
    assert lanes.b.delivered == [(0, b"x" * 1000)]
    wire_bytes = next(event.wire_bytes for event in lanes.a.events if hasattr(event, "wire_bytes"))
    assert wire_bytes[0] < 1000 + 400 + 3 * 48 + 150


def test_chunks_written_to_a_lane_that_the_peer_never_saw_open_are_sent_again():
    """The dialler gave the lane up before it read JOINED."""
    lanes = Lanes(0)
    lanes.settle()
    number = lanes.open_lane()
    assert lanes.a.write_bulk(number)
    lanes.b.read_bulk(number, 1 << 20)
    assert lanes.b.bulk[number].state is State.BULK
    lanes.a.drop_lane(number)
    lanes.b.offer(b"y" * 500)
    lanes.b.write_control()
    # As if its first answer had come: then chunks would be on it.
    lanes.b.bulk[number].pings.answered = True
    while lanes.b.write_bulk(number):
        pass
    lanes.b.drop_lane(number)
    lanes.settle()
    assert lanes.a.delivered == [(0, b"y" * 500)]


def test_a_lane_dialled_there_carries_chunks_only_once_it_has_answered():
    lanes = Lanes(0)
    lanes.settle()
    number = lanes.open_lane()
    lanes.a.write_bulk(number)
    lanes.b.read_bulk(number, 1 << 20)
    assert not lanes.b.bulk[number].carries_chunks
    lanes.settle()
    assert lanes.b.bulk[number].carries_chunks and lanes.a.bulk[number].carries_chunks


def test_retired_lane_loses_nothing_in_either_direction():
    lanes = Lanes(2)
    _sent_over(lanes, 1, b"x" * 1000, chunk=400)
    lanes.b.offer(b"y" * 1000)
    lanes.b.write_control()
    while lanes.b.write_bulk(1):
        pass
    lanes.a.bulk[1].retire("not needed", now=0.0)
    assert not lanes.a.bulk[1].carries_chunks
    lanes.settle()
    assert 1 not in lanes.b.bulk
    assert lanes.b.delivered == [(0, b"x" * 1000)]


def test_the_same_range_on_two_lanes_is_a_protocol_error():
    """Only so can no lane have a view of a slot that was given to another message (P-17)."""
    lanes = Lanes(2)
    _sent_over(lanes, 1, b"x" * 1000, chunk=1000)
    lanes.b.read(1 << 20)
    lanes.b.read_bulk(1, 500)
    raw = memoryview(b"y" * 300)
    lanes.a.outs[2] += chunk_header(stream=0, view=VIEW, seq=0, raw_offset=600, raw=raw) + raw
    lane = lanes.b.bulk[2]
    lanes.b.read_bulk(2, 1 << 20)
    assert "600..900 is arriving already" in lane.close_reason
    lanes.settle()
    assert lanes.b.delivered == [(0, b"x" * 1000)]


def test_closed_bulk_lane_writes_nowhere_any_more():
    lanes = Lanes(1)
    _sent_over(lanes, 1, b"x" * 1000, chunk=1000)
    lanes.b.read(1 << 20)
    lanes.b.read_bulk(1, 500)
    lane, before = lanes.b.bulk[1], bytes(lanes.b.ring)
    lanes.b.drop_lane(1)
    room = lane.get_buffer()
    room[:200] = b"z" * 200
    lane.buffer_updated(200, now=0.0)
    assert bytes(lanes.b.ring) == before


def test_what_the_control_lane_alone_may_carry_closes_a_bulk_lane():
    for kind in (FrameType.MESSAGE, FrameType.RESUME, FrameType.GONE, FrameType.BOARD):
        lanes = Lanes(1)
        lanes.settle()
        lane = lanes.b.bulk[1]
        lanes.a.outs[1] += control_frame(kind, {})
        lanes.b.read_bulk(1, 1 << 20)
        assert f"{kind.name} while open for bulk" in lane.close_reason
        assert lanes.b.lane.state is State.OPEN


def test_bulk_lane_is_given_up_early_only_while_the_control_lane_answers():
    lanes = Lanes(1)
    lanes.settle()
    end = lanes.a
    lane = end.bulk[1]
    lane.handle_timer(now=1.0)
    end.rtt.on_sample(0.1, now=3.0)
    lane.handle_timer(now=3.6)
    assert lane.state is State.BULK  # the path was last seen to work 2 s after that ping
    end.rtt.on_sample(0.1, now=3.6)
    lane.handle_timer(now=3.6)
    assert lane.close_reason == "ping timeout: silent for 2.6 s"


def test_bulk_lane_that_always_answered_slowly_is_given_more_time():
    lanes = Lanes(1)
    lanes.settle()
    lane = lanes.a.bulk[1]
    lane.pings.slowest_s = 1.5
    lane.handle_timer(now=1.0)
    lanes.a.rtt.on_sample(0.1, now=6.9)
    lane.handle_timer(now=6.9)
    assert lane.state is State.BULK
    lanes.a.rtt.on_sample(0.1, now=7.0)
    lane.handle_timer(now=7.0)
    assert lane.state is State.CLOSED


def test_number_of_lanes_is_bounded_also_by_those_the_peer_never_buries():
    lives = BulkLives()
    for number in range(1, MAX_BULK_LANES + 1):
        lives.up(number)
    for number in range(1, 11):
        lives.down(number)
    assert "at most 64" in lives.why_not(100)
    assert "was there already" in lives.why_not(1)
    assert lives.peer_gone(1) is False
    assert lives.why_not(100) is None


def test_tales_of_lanes_that_never_were_end():
    lives = BulkLives()
    with pytest.raises(ProtocolError, match="never were"):
        for number in range(1, 1000):
            lives.peer_gone(number)


def test_each_end_tells_once_whoever_noticed_first():
    one, other = BulkLives(), BulkLives()
    for lives in (one, other):
        lives.up(1)
    one.down(1)
    assert one.next_to_tell() == 1
    assert other.peer_gone(1) is True
    other.down(1)
    assert other.next_to_tell() == 1
    assert one.peer_gone(1) is False
    for lives in (one, other):
        assert lives.next_to_tell() is None and lives.why_not(1) is None
