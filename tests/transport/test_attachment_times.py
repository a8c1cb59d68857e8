"""When messages came and went: both ends of a stream, with a clock that the test sets."""

import threading
from types import SimpleNamespace

import pytest

from geotrain.transport import attachment_incoming, attachment_streams
from geotrain.transport.attachment_incoming import InStream
from geotrain.transport.attachment_streams import OutStream
from geotrain.transport.messages import Message

VIEW = 3
RING = 64 * 1024


class Pair:
    """One stream without anything in between: the test delivers and acknowledges."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self.posted: list = []
        self.out = OutStream(
            stream=0, memory=memoryview(bytearray(RING)), lock=lock, post=self.posted.append
        )
        self.incoming = InStream(
            stream=0, memory=memoryview(bytearray(RING)), lock=lock, post=lambda _: None
        )
        self.out.open(VIEW, RING)
        self.incoming.open(VIEW)

    def send(
        self, microbatch: int, *, part: int = 0, num_parts: int = 1, packed_s: float = 0.0
    ) -> None:
        self.out.send(
            kind="forward", step=5, microbatch=microbatch, part=part, num_parts=num_parts,
            inline=b"x", packed_s=packed_s,
        )  # fmt: skip

    def deliver(self) -> None:
        message = Message.from_map(self.posted.pop(0)["message"])
        self.incoming.on_delivered(message, board_view=VIEW)

    def take(self) -> None:
        received = self.incoming.take()
        assert received is not None
        received.release()


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    for module in (attachment_streams, attachment_incoming):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_a_passage_lasts_from_sending_to_acknowledgement(clock):
    pair = Pair()
    pair.send(7)
    clock.s = 100.3
    pair.out.on_acked(VIEW, [0], [10])
    assert pair.out.take_passages() == [("forward", 5, 7, 100.0, 100.3)]
    assert pair.out.take_passages() == []


def test_a_message_in_parts_is_one_passage_from_its_first_part_on(clock):
    pair = Pair()
    pair.send(1, part=0, num_parts=2)
    clock.s = 100.1
    pair.send(1, part=1, num_parts=2)
    clock.s = 100.2
    pair.out.on_acked(VIEW, [0], [10])
    assert pair.out.take_passages() == []
    clock.s = 100.5
    pair.out.on_acked(VIEW, [1], [10])
    assert pair.out.take_passages() == [("forward", 5, 1, 100.0, 100.5)]


def test_packing_beside_the_stage_is_a_part_of_the_passage(clock):
    pair = Pair()
    for part in range(2):
        pair.send(2, part=part, num_parts=2, packed_s=0.25)
        clock.s += 0.5
    pair.out.on_acked(VIEW, [0, 1], [10, 10])
    assert pair.out.take_passages() == [("forward", 5, 2, 99.75, 101.0)]


def test_unpacking_beside_the_stage_is_no_hold(clock):
    pair = Pair()
    pair.incoming.expect("forward", 5, 3, lambda message, payload: expected.append(message))
    expected: list[Message] = []
    pair.send(3)
    pair.deliver()
    clock.s = 103.0
    pair.incoming.release_early(expected[0], begun_s=101.0)
    assert pair.incoming.take_holds() == [("forward", 5, 3, 1.0)]
    pair.take()
    assert pair.incoming.take_holds() == [], "once"


def test_a_hold_lasts_from_arrival_to_release(clock):
    pair = Pair()
    for microbatch in (0, 1):
        pair.send(microbatch)
        pair.deliver()
    clock.s = 102.0
    pair.take()
    clock.s = 103.5
    pair.take()
    assert pair.incoming.take_holds() == [("forward", 5, 0, 2.0), ("forward", 5, 1, 3.5)]
    assert pair.incoming.take_holds() == []


def test_what_nobody_asks_for_does_not_pile_up():
    pair = Pair()
    for number in range(2 * attachment_streams.MAX_TIMES):
        pair.send(number)
        pair.deliver()
        pair.take()
        pair.out.on_acked(VIEW, [number], [1])
    assert len(pair.out.take_passages()) == attachment_streams.MAX_TIMES
    assert len(pair.incoming.take_holds()) == attachment_streams.MAX_TIMES


def test_slots_are_what_both_rings_hold():
    out = Pair().out
    assert [out.slots(n) for n in (1, 1000, RING // 2, RING, 2 * RING)][1:] == [64, 2, 1, 1]
    out.open(VIEW + 1, RING // 2)
    assert out.slots(RING // 4) == 2
