import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.transport.events import BoardReceived, LaneClosed, PeerRefused
from geotrain.transport.frame import FrameType, control_frame
from geotrain.transport.messages import Presence
from geotrain.transport.protocol import HANDSHAKE_S
from geotrain.transport.transitions import TRANSITIONS, State
from tests.transport.lane_pair import (
    RING_BYTES,
    RUN,
    End,
    connect,
    disconnect,
    make_hello,
    make_pair,
    settle,
)


def _refusal(end: End) -> PeerRefused:
    return next(event for event in end.events if isinstance(event, PeerRefused))


def test_both_sides_open_after_hello_and_welcome():
    a, b = make_pair()
    settle(a, b)
    assert a.lane.state is State.OPEN and b.lane.state is State.OPEN


@pytest.mark.parametrize("dialler", ["a", "b"])
def test_different_run_is_refused_on_both_sides_with_keys_and_values(dialler):
    a, b = make_pair(connected=False)
    b.hello = make_hello("b", run={**RUN, "seed": 1, "plan": {"microbatches": 4}})
    connect(*(a, b) if dialler == "a" else (b, a))
    settle(a, b)
    assert dict((key, (one, other)) for key, one, other in _refusal(a).differing) == {
        "run.seed": (0, 1),
        "run.plan": (None, "{'microbatches': 4}"),
    }
    assert {(key, other, one) for key, one, other in _refusal(b).differing} == set(
        _refusal(a).differing
    )
    for end in (a, b):
        assert "run.seed is 0 in a, 1 in b" in end.closed_because() or (
            "run.seed is 1 in b, 0 in a" in end.closed_because()
        )


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"proto": 1}, "proto"),
        ({"version": "0.2.0"}, "version"),
        ({"run_id": "other"}, "run_id"),
        ({"region": "c"}, "peer's name"),
        ({"to": "c"}, "own name"),
        ({"index": 0}, "index"),
    ],
)
def test_handshake_compares(changes, key):
    a, b = make_pair(connected=False)
    b.hello = make_hello("b", **changes)
    connect(b, a)
    settle(a, b)
    assert [row[0] for row in _refusal(a).differing] == [key]


def test_lost_pong_closes_the_lane_after_silent_s_whatever_else_arrives():
    a, b = make_pair()
    settle(a, b, now=0.0)
    for second in range(1, 11):
        assert a.lane.state is State.OPEN
        a.lane.handle_timer(now=float(second))
        while a.write():
            pass
        a.out.clear()  # nothing gets through to b
        b.lane.publish([Presence(region="b", revision=second)])
        settle_one_way(b, a, now=float(second))
    a.lane.handle_timer(now=11.0)
    assert a.closed_because() == "ping timeout: silent for 10.0 s"
    a.collect()
    assert a.events[-1] == LaneClosed(reason=a.lane.close_reason)


def settle_one_way(sender: End, receiver: End, *, now: float) -> None:
    while sender.write():
        pass
    receiver.read(len(sender.out), now=now)


def test_pings_go_out_at_their_interval_and_measure_the_round_trip():
    a, b = make_pair()
    settle(a, b, now=0.0)
    assert a.lane.get_timer() == 1.0
    a.lane.handle_timer(now=1.0)
    while a.write():
        pass
    b.read(1000, now=1.05)
    while b.write():
        pass
    a.read(1000, now=1.1)
    assert a.rtt.quantile_s(1.0) == pytest.approx(0.1)
    assert a.rtt.take_recent()[1][-1] == pytest.approx(0.05)
    assert a.lane.get_timer() == 2.0


def test_handshake_has_a_deadline():
    a, _ = make_pair()
    assert a.lane.get_timer() == HANDSHAKE_S
    a.lane.handle_timer(now=HANDSHAKE_S)
    assert "no handshake within 10 s" in a.closed_because()


def test_whole_board_goes_out_at_once_and_then_changes():
    a, b = make_pair(connected=False)
    a.board = [Presence(region="a", revision=1), Presence(region="c", revision=4)]
    connect(a, b)
    settle(a, b)
    a.lane.publish([Presence(region="a", revision=2)])
    a.lane.publish([Presence(region="a", revision=3)])
    settle(a, b)
    boards = [event.entries for event in b.events if isinstance(event, BoardReceived)]
    assert boards[-2:] == [tuple(a.board), (Presence(region="a", revision=3),)]


def test_big_board_goes_in_several_frames():
    a, b = make_pair(connected=False)
    identity = {"x": "y" * 16_000}
    a.board = [Presence(region=f"r{n}", identity=identity, error=identity) for n in range(12)]
    connect(a, b)
    settle(a, b)
    boards = [event.entries for event in b.events if isinstance(event, BoardReceived)]
    assert sum(map(len, boards)) == 12 and len(boards) > 1


def test_close_reason_reaches_the_peer():
    a, b = make_pair()
    settle(a, b)
    a.lane.close("the daemon was ended")
    settle(a, b)
    assert b.closed_because() == "closed by the other side: the daemon was ended"


def test_frames_that_the_table_does_not_allow_close_the_lane():
    frames = {
        kind: control_frame(kind, None if kind in _BARE else {}, raw_length=_BARE.get(kind, 0))
        for kind in FrameType
        if kind is not FrameType.CHUNK
    }
    for state in (State.WAIT_WELCOME, State.WAIT_HELLO, State.OPEN):
        for kind, frame in frames.items():
            if kind in TRANSITIONS[state]:
                continue
            a, b = make_pair()
            if state is State.OPEN:
                settle(a, b)
            end = b if state is State.WAIT_HELLO else a
            end.feed(frame)
            assert f"{kind.name} while {state.value}" in end.closed_because()


_BARE = {
    **dict.fromkeys((FrameType.PING, FrameType.PONG, FrameType.JOINED, FrameType.LANES), 0),
    FrameType.NAK: 5,
}


def test_damaged_control_frame_closes_the_lane():
    a, b = make_pair()
    a.write()
    a.out[60] ^= 1
    b.read(len(a.out))
    assert "checksum of a HELLO frame" in b.closed_because()


def _recording(seed: int) -> bytes:
    """Everything an end writes in a short, busy life, up to where it waits for an answer."""
    a, b = make_pair()
    settle(a, b)
    rng = random.Random(seed)
    for size in (5, 700, 1500):
        a.offer(rng.randbytes(size // 2) + bytes(size - size // 2), hinted=True)
    a.lane.publish([Presence(region="a", revision=1)])
    while a.write():
        pass
    return bytes(a.out)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 47, 48, 49, 600, 5000]))
@settings(max_examples=60, deadline=None)
def test_frames_may_be_split_anywhere(seed, longest):
    rest = _recording(seed % 4)
    rng = random.Random(seed)
    a, b = make_pair()
    settle(a, b)
    while rest:
        size = rng.randint(1, longest)
        b.feed(rest[:size])
        rest = rest[size:]
    while b.coded:
        b.decode_one()
    assert [len(payload) for _, payload in b.delivered] == [5, 700, 1500]


@given(st.integers(0, 2**32), st.integers(1, 8), st.booleans())
@settings(max_examples=300, deadline=None)
def test_mutated_bytes_never_raise_and_never_reach_a_rank(seed, num_changes, opened):
    recording = bytearray(_recording(seed % 4))
    rng = random.Random(seed)
    for _ in range(num_changes):
        recording[rng.randrange(len(recording))] = rng.randrange(256)
    a, b = make_pair()
    if opened:
        settle(a, b)
    b.feed(bytes(recording))
    while b.coded:
        b.decode_one()
    # What is delivered is what was sent: a changed byte is found or was not one.
    rng = random.Random(seed % 4)
    sent = [rng.randbytes(size // 2) + bytes(size - size // 2) for size in (5, 700, 1500)]
    assert [payload for _, payload in b.delivered] == sent[: len(b.delivered)]


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_random_bytes_never_raise(data):
    _a, b = make_pair()
    b.feed(data)
    settled, other = make_pair()
    settle(settled, other)
    other.feed(data)
    assert bytes(other.ring) == bytes(RING_BYTES)


@given(
    st.sampled_from(list(FrameType)),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-5, 2**63)
        | st.text(max_size=5)
        | st.binary(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "seqs",
                        "streams",
                        "entries",
                        "reason",
                        "region",
                        "expected",
                        "released",
                        "incomplete",
                        "kind",
                        "view",
                        "stream",
                        "seq",
                        "step",
                        "microbatch",
                    ]
                )
                | st.integers(0, 2),
                inner,
                max_size=6,
            )
        ),
        max_leaves=12,
    ),
    st.integers(0, 3),
    st.integers(6, 8),
)
@settings(max_examples=400, deadline=None)
def test_well_framed_nonsense_never_raises(kind, record, stream, view):
    if kind in _BARE or kind is FrameType.CHUNK or not isinstance(record, dict):
        record = None
    if kind is FrameType.CHUNK:
        return
    a, b = make_pair()
    settle(a, b)
    b.offer(b"x" * 50)
    settle(a, b)
    b.feed(control_frame(kind, record, stream=stream, view=view, raw_length=0))
    b.write()


def test_ping_flood_is_answered_once():
    a, b = make_pair()
    settle(a, b)
    for number in range(100, 200):
        b.feed(control_frame(FrameType.PING, seq=number))
    frames = 0
    while b.write():
        frames += 1
    assert frames == 1


def test_partial_chunk_does_not_count_after_the_lane_died():
    a, b = make_pair()
    settle(a, b)
    a.offer(b"x" * 1000)
    while a.write(limit=1000):
        pass
    b.read(len(a.out) - 1)
    disconnect(a, b)
    state = next(iter(b.session._receives.values())).state()
    assert list(state.incomplete[0]) == []
