"""A daemon that takes another's place: the ranks hold all that it must know."""

import random
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.transport.attachment_incoming import InStream, Received
from geotrain.transport.attachment_streams import OutStream
from geotrain.transport.events import Acked, Delivered, Event, LaneClosed, ViewFailed
from geotrain.transport.flow import Ring
from geotrain.transport.messages import Message, Presence
from geotrain.transport.receiving import ReceiveStream
from geotrain.transport.restoring import Restored, Restoring, to_records
from geotrain.transport.sending import SendStream
from geotrain.transport.session import Session
from tests.transport.lane_pair import (
    RING_BYTES,
    VIEW,
    End,
    connect,
    disconnect,
    settle,
    shake_hands,
)
from tests.transport.many_lanes import Lanes, LanesEnd

OPS = ["offer"] * 8 + ["write"] * 24 + ["read"] * 24 + ["decode"] * 6
OPS += ["take"] * 6 + ["release"] * 3 + ["cut", "kill", "kill", "start", "start"]
INCARNATION = 5


@dataclass
class RankEnd(End):
    """An end whose rank is the real one: its streams outlive the session."""

    memory: bytearray = field(default_factory=lambda: bytearray(RING_BYTES))
    received: list[Received] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)
    is_dead: bool = False

    def __post_init__(self) -> None:
        lock = threading.RLock()
        post, ring = self._post, memoryview(self.ring)
        self.sending = OutStream(
            stream=self.sends, memory=memoryview(self.memory), lock=lock, post=post
        )
        self.receiving = InStream(stream=self.receives, memory=ring, lock=lock, post=post)

    def open_view(self, view: int = VIEW) -> None:
        super().open_view(view)
        self.sending.open(view, RING_BYTES)
        self.receiving.open(view)

    def _post(self, record: Any) -> None:
        if self.is_dead:
            return
        if record["type"] == "release":
            self.session.release(record["stream"], record["view"], record["seqs"])
        else:
            message = Message.from_map(record["message"], with_start=True)
            self.session.offer(message, self._payload(message))

    def _payload(self, message: Message) -> memoryview | None:
        if not message.payload_bytes:
            return None
        return memoryview(self.memory)[message.start : message.start + message.payload_bytes]

    def send(self, payload: bytes, *, microbatch: int) -> None:
        size = 0 if len(payload) <= 16 else len(payload)
        if not self.sending.fits(size):
            return
        start = 0
        if size:
            start, slot = self.sending.reserve(size)
            slot[:] = payload
        self.payloads.append(payload)
        self.sending.send(
            kind="forward",
            step=0,
            microbatch=microbatch,
            start=start,
            payload_bytes=size,
            inline=b"" if size else payload,
            hints=((size // 4, size // 2),) if size and microbatch % 2 else (),
        )

    def _take(self, event: Event, now: float) -> None:
        assert not isinstance(event, ViewFailed), event
        assert not isinstance(event, LaneClosed) or event.reason == "cut", event
        match event:
            case Delivered(message=message):
                self.receiving.on_delivered(message, board_view=VIEW)
            case Acked(view=view, seqs=seqs, wire_bytes=wire_bytes):
                self.sending.on_acked(view, seqs, wire_bytes)
            case _:
                super()._take(event, now)

    def take_one(self) -> None:
        received = self.receiving.take()
        if received is not None:
            self.received.append(received)
            self.taken.append(bytes(received.payload))

    def release_one(self, number: int) -> None:
        if self.received:
            received = self.received.pop(number % len(self.received))
            # Nobody may have written into a slot that the rank still holds.
            assert bytes(received.payload) == self.taken[received.message.seq]
            received.release()

    def kill(self) -> None:
        """SIGKILL of the daemon: everything that it knew is gone."""
        self.is_dead = True
        self.session = Session()
        self.coding.clear()
        self.coded.clear()

    def start(self) -> None:
        """The next daemon hears of the rank what it needs."""
        self.is_dead = False
        told = Restored(
            view=VIEW,
            own=Presence(region=self.region, incarnation=INCARNATION, state="ready"),
            board=[Presence(region="z")],
            sends={self.sends: self.sending.kept(VIEW, RING_BYTES)},
            receives={self.receives: self.receiving.kept(VIEW)},
        )
        restored = hear(told, self.region)
        sends = SendStream.restored(
            stream=self.sends, view=VIEW, past=restored.sends[self.sends], payload=self._payload
        )
        receives = ReceiveStream.restored(
            stream=self.receives,
            memory=memoryview(self.ring),
            past=restored.receives[self.receives],
        )
        self.session.restore_view(VIEW, [sends], [receives])


def hear(told: Restored, region: str) -> Restored:
    """What the daemon makes of the records of a rank."""
    restoring = Restoring(region, INCARNATION)
    *others, last = to_records(told)
    for record in others:
        assert restoring.take(record) is None
    restored = restoring.take(last)
    assert restored is not None
    return restored


def apply(a: RankEnd, b: RankEnd, op: str, end: RankEnd, number: int, rng: random.Random) -> None:
    if op == "offer":
        size = rng.choice([0, 5, 16, 17, 64, 300, 1000, 2500])
        payload = rng.randbytes(size) if number % 3 else bytes([number % 256]) * size
        end.send(payload, microbatch=number % 4)
    elif op == "take":
        end.take_one()
    elif op == "release":
        end.release_one(number)
    elif op == "kill" and not end.is_dead:
        disconnect(a, b)
        end.kill()
    elif op == "start" or op == "cut":
        disconnect(a, b)
        for one in (a, b):
            if one.is_dead:
                one.start()
        connect(a, b)
        if number % 4:  # else the next cut may fall into the handshake
            shake_hands(a, b)
    elif not (a.is_dead or b.is_dead):
        if op == "write":
            end.write(limit=1 + number % 700)
        elif op == "read":
            end.read(1 + number % 900)
        elif op == "decode":
            end.decode_one()


def finish(a: RankEnd, b: RankEnd, rng: random.Random) -> None:
    apply(a, b, "start", a, 0, rng)
    moving = True
    while moving:
        settle(a, b)
        moving = False
        for end in (a, b):
            while end.receiving.pending():
                moving = True
                end.take_one()
            while end.received:
                moving = True
                end.release_one(rng.randrange(64))


@given(st.integers(0, 2**32), st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_daemons_may_die_at_any_moment_and_every_message_arrives_once(seed, num_ops):
    rng = random.Random(seed)
    a, b = RankEnd("a"), RankEnd("b")
    a.peer, b.peer = b, a
    a.open_view()
    b.open_view()
    connect(a, b)
    shake_hands(a, b)
    for _ in range(num_ops):
        apply(a, b, rng.choice(OPS), rng.choice([a, b]), rng.randrange(2**16), rng)
    finish(a, b, rng)
    for sender, receiver in ((a, b), (b, a)):
        assert receiver.taken == sender.payloads
        assert sender.sending.unacknowledged == 0
        assert sender.sending.fits(RING_BYTES)


LANE_OPS = ["offer"] * 4 + ["control", "bulk", "read", "read_bulk"] * 8 + ["decode"] * 3
LANE_OPS += ["take"] * 4 + ["release"] * 2 + ["reset", "half_reset", "open"]
LANE_OPS += ["kill", "start", "start", "restore", "restore"]


@dataclass
class RankLanesEnd(RankEnd, LanesEnd):
    """Such an end with bulk lanes. Its rank may come back later than its lanes."""

    is_down: bool = False
    """Whether there is no daemon at all; `is_dead` is that the rank has none."""

    def _take(self, event: Event, now: float) -> None:
        if isinstance(event, LaneClosed):
            assert "error" not in event.reason, event
            LanesEnd._take(self, event, now)
        else:
            super()._take(event, now)

    def kill(self) -> None:
        super().kill()
        self.is_down = True

    def start(self) -> None:
        super().start()
        for event in self.session.events_received():
            self._take(event, 0.0)


def begin(lanes: Lanes) -> None:
    """New control lanes, and daemons where there is none."""
    lanes.cut_control()
    for end in lanes.ends:
        end.is_down = False


def apply_to_lanes(
    lanes: Lanes, op: str, end: RankLanesEnd, number: int, rng: random.Random
) -> None:
    lane = rng.choice(lanes.numbers) if lanes.numbers else 0
    are_linked = not any(one.is_down for one in lanes.ends)
    match op:
        case "offer" | "take" | "release":
            apply(*lanes.ends, op, end, number, rng)
        case "kill":
            lanes.end_all(count_anew=end is lanes.a)
            end.kill()
        case "start":
            begin(lanes)
            if number % 4:
                shake_hands(*lanes.ends)
        case "restore" if end.is_dead and not end.is_down:
            end.start()
        case "control" if are_linked:
            end.write_control(limit=1 + number % 700)
        case "bulk" if are_linked:
            end.write_bulk(lane, limit=1 + number % 700)
        case "read" if are_linked:
            end.read(1 + number % 900)
        case "read_bulk" if are_linked:
            end.read_bulk(lane, 1 + number % 900)
        case "decode" if are_linked:
            end.decode_one()
        case "half_reset" if are_linked:
            end.drop_lane(lane)
        case "reset" if are_linked:
            for side in lanes.ends:
                side.drop_lane(lane)
        case "open" if are_linked and len(lanes.numbers) < 4:
            lanes.open_lane()
    for side in lanes.ends:
        side.check()


def finish_lanes(lanes: Lanes, rng: random.Random) -> None:
    begin(lanes)
    shake_hands(*lanes.ends)
    lanes.open_lane()
    for end in lanes.ends:
        lanes.settle()
        if end.is_dead:
            end.start()
    moving = True
    while moving:
        lanes.settle()
        moving = False
        for end in lanes.ends:
            while end.receiving.pending():
                moving = True
                end.take_one()
            while end.received:
                moving = True
                end.release_one(rng.randrange(64))


@given(st.integers(0, 2**32), st.integers(0, 400))
@settings(max_examples=150, deadline=None)
def test_ranks_may_come_back_while_bulk_lanes_are_open_already(seed, num_ops):
    rng = random.Random(seed)
    lanes = Lanes(2, kind=RankLanesEnd)
    for _ in range(num_ops):
        op, end = rng.choice(LANE_OPS), rng.choice(lanes.ends)
        apply_to_lanes(lanes, op, end, rng.randrange(2**16), rng)
    finish_lanes(lanes, rng)
    for sender, receiver in (lanes.ends, lanes.ends[::-1]):
        assert receiver.taken == sender.payloads
        assert sender.sending.unacknowledged == 0
        assert sender.sending.fits(RING_BYTES)


def test_lanes_of_the_next_daemon_have_no_part_in_the_account_of_those_before():
    lanes = Lanes(1, kind=RankLanesEnd)
    a, b = lanes.ends
    lanes.settle()
    b.send(b"x" * 2500, microbatch=0)
    while b.write_control() or b.write_bulk(1):
        pass
    lanes.end_all(count_anew=True)
    a.kill()
    begin(lanes)
    assert [lanes.open_lane(), lanes.open_lane()] == [1, 2]
    lanes.settle()
    a.start()
    _exchange_control(lanes)
    while b.write_bulk(2):
        pass
    under_way = len(b.outs[2])
    assert under_way > 2500
    # Of this lane 1 nothing was lost: what was written to the one before is under way on lane 2.
    a.drop_lane(1)
    _exchange_control(lanes)
    assert not b.write_bulk(2) and len(b.outs[2]) == under_way
    lanes.settle()
    a.take_one()
    assert a.taken == b.payloads


def _exchange_control(lanes: Lanes) -> None:
    while any([end.write_control() for end in lanes.ends]):
        for end in lanes.ends:
            end.read(len(end.other.out))


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_restored_ring_gives_the_same_places_as_the_one_that_is_gone(seed):
    rng = random.Random(seed)
    ring, sizes = Ring(RING_BYTES), {}
    for _ in range(40):
        size = rng.randrange(1, 1500)
        if rng.random() < 0.6 and ring.fits(size):
            sizes[ring.allocate(size)] = size
        elif sizes:
            start = rng.choice(sorted(sizes))
            del sizes[start]
            ring.free(start)
    other = Ring.restored(RING_BYTES, cursor=ring.cursor, slots=sizes.items())
    assert (other.live_bytes, other.cursor) == (ring.live_bytes, ring.cursor)
    for size in (1, 64, 700, RING_BYTES):
        assert other.fits(size) == ring.fits(size)
        if ring.fits(size):
            assert other.allocate(size) == ring.allocate(size)


@pytest.mark.parametrize(
    ("cursor", "slots"),
    [
        (63, []),
        (-64, []),
        (RING_BYTES + 64, []),
        (0, [(1, 10)]),
        (0, [(64, RING_BYTES)]),
        (128, [(0, 100), (64, 10)]),
        (128, [(0, 0)]),
        (128, [(0, -1)]),
    ],
)
def test_a_ring_that_cannot_be_is_refused(cursor, slots):
    with pytest.raises(ValueError):
        Ring.restored(RING_BYTES, cursor=cursor, slots=slots)


def message(seq: int, *, view: int = VIEW, stream: int = 0) -> dict[str, Any]:
    return Message(stream=stream, view=view, seq=seq, kind="forward", step=0, microbatch=0).to_map(
        with_start=True
    )


OWN = {"type": "board", "entry": Presence(region="a", incarnation=INCARNATION).to_map()}
SENT = {"type": "sent", "stream": 0, "num_sent": 3, "peer_capacity": 4096, "peer_cursor": 0}
RESUME, RESUMED = {"type": "resume", "view": VIEW}, {"type": "resumed"}


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([OWN], "out of turn"),
        ([RESUME, RESUME], "out of turn"),
        ([RESUME, RESUMED], "own entry is missing"),
        ([RESUME, OWN, OWN, RESUMED], "twice there"),
        ([RESUME, {"type": "send"}], "'send' while resuming"),
        ([RESUME, {"type": "board", "entry": {}}], "region"),
        ([RESUME, {**SENT, "num_sent": -1}, OWN, RESUMED], "num_sent"),
        ([RESUME, SENT, SENT], "restored twice"),
        ([RESUME, {"type": "held", "message": message(0)}], "not begun"),
        ([RESUME, SENT, {"type": "held", "message": message(0, view=8)}], "another view"),
        (
            [RESUME, SENT, *[{"type": "held", "message": message(n)} for n in (1, 1)]],
            "out of sequence",
        ),
        ([RESUME, SENT, {"type": "held", "message": message(3)}, OWN, RESUMED], "come to 3"),
        ([RESUME, SENT, {"type": "held", "message": {}}], "stream"),
        ([{"type": "resume", "view": "x"}], "view"),
        ([RESUME, *({**SENT, "stream": n} for n in range(65))], "more than 64 streams"),
    ],
)
def test_records_that_make_no_sense_are_refused(records, why):
    restoring = Restoring("a", INCARNATION)
    with pytest.raises(ValueError, match=why):
        for record in records:
            restoring.take(record)


def test_a_rank_of_another_life_is_refused():
    told = Restored(view=VIEW, own=Presence(region="a", incarnation=INCARNATION + 1), board=[])
    with pytest.raises(ValueError, match="another life"):
        hear(told, "a")


def test_what_was_told_is_what_is_heard():
    told = Restored(
        view=VIEW,
        own=Presence(region="a", incarnation=INCARNATION, state="failed", error={"kind": "lost"}),
        board=[Presence(region="b", incarnation=1), Presence(region="c")],
    )
    assert hear(told, "a") == told
    assert hear(replace(told, view=0), "a").view == 0
