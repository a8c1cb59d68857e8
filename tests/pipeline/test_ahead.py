"""What an edge takes next is unpacked before it is asked for: one message, and no more."""

import threading

import pytest
import torch

from geotrain.pipeline.ahead import Ahead
from geotrain.pipeline.parcel import Codecs, pack_tree
from geotrain.pipeline.worker import Worker
from geotrain.transport.attachment_incoming import InStream
from geotrain.transport.messages import Message

CPU = torch.device("cpu")
RAW = Codecs(activations="none", gradients="none")
VIEW = 3


class Receiver:
    """One stream into this rank, with messages of one float each, or of a broken header."""

    def __init__(self, unpacker):
        self.memory = bytearray(4096)
        self.records = []
        self.stream = InStream(
            stream=1,
            memory=memoryview(self.memory),
            lock=threading.RLock(),
            post=self.records.append,
        )
        self.stream.open(VIEW)
        self.ahead = Ahead(self.stream, unpacker)
        self._seq = 0

    def deliver(self, microbatch, *, num_parts=1, header=None):
        parcel = pack_tree(torch.tensor([microbatch]), None, role="activation", codecs=RAW)
        start = self._seq * 64
        payload = torch.frombuffer(self.memory, dtype=torch.uint8)
        parcel.copy_range(0, payload[start : start + parcel.payload_bytes])
        message = Message(
            stream=1,
            view=VIEW,
            seq=self._seq,
            kind="forward",
            step=1,
            microbatch=microbatch,
            part=0,
            num_parts=num_parts,
            header=parcel.header if header is None else header,
            payload_bytes=parcel.payload_bytes,
            start=start,
            inline=b"",
            hints=(),
        )
        self._seq += 1
        self.stream.on_delivered(message, board_view=VIEW)
        return message

    def released(self):
        return [seq for record in self.records for seq in record["seqs"]]

    def expect(self, microbatch, *, device=CPU):
        self.ahead.expect("forward", 1, microbatch, device=device)


@pytest.fixture
def unpacker():
    unpacker = Worker("geotrain-unpacker")
    yield unpacker
    unpacker.close()


@pytest.fixture
def receiver(unpacker):
    return Receiver(unpacker)


def finish(unpacker):
    """Until everything submitted so far is done."""
    unpacker.submit(lambda: (None, None, "")).result(timeout=10)


@pytest.mark.parametrize("comes_first", [True, False])
def test_an_expected_message_is_unpacked_whether_it_is_there_or_comes(
    receiver, unpacker, comes_first
):
    if comes_first:
        message = receiver.deliver(4)
        receiver.expect(4)
    else:
        receiver.expect(4)
        receiver.deliver(9)
        message = receiver.deliver(4)
    finish(unpacker)
    receiver.memory[:] = bytes(4096)  # what is handed out lies elsewhere by then
    tree, side, signature = receiver.ahead.take(message)
    assert (tree.item(), side, signature) == (4, None, "int64")
    assert receiver.ahead.take(message) is None


def test_a_message_that_is_in_hand_already_is_unpacked_too(receiver, unpacker):
    message = receiver.deliver(0)
    received = receiver.stream.take()
    receiver.expect(0)
    finish(unpacker)
    assert receiver.ahead.take(message)[0].item() == 0
    received.release()
    assert receiver.released() == [message.seq], "once, whoever says it"


def test_the_slot_is_given_back_once_and_what_is_unpacked_is_kept(receiver, unpacker):
    receiver.expect(1)
    other, expected = receiver.deliver(0), receiver.deliver(1)
    again = receiver.deliver(1)
    finish(unpacker)
    assert receiver.released() == [expected.seq]
    receiver.memory[:] = bytes(4096)
    receiver.expect(1)
    assert receiver.ahead.take(other) is None
    assert receiver.ahead.take(expected)[0].item() == 1, "it is nowhere else any more"
    assert receiver.ahead.take(again) is None
    taken = receiver.stream.take()
    assert taken.message is other
    taken.release()
    assert receiver.stream.take().message is expected, "in its order, whoever has copied it"
    assert receiver.released() == [expected.seq, other.seq]


def test_what_another_view_brings_is_not_given_back_twice(receiver, unpacker):
    receiver.expect(0)
    message = receiver.deliver(0)
    finish(unpacker)
    receiver.stream.open(VIEW + 1)
    assert receiver.released() == [message.seq]


def test_a_part_of_a_larger_message_and_other_devices_are_left_alone(receiver, unpacker):
    receiver.expect(0)
    part = receiver.deliver(0, num_parts=2)
    receiver.expect(1, device=torch.device("meta"))
    elsewhere = receiver.deliver(1)
    assert receiver.ahead.take(part) is None
    assert receiver.ahead.take(elsewhere) is None


def test_a_malformed_message_fails_where_it_is_taken(receiver, unpacker):
    receiver.expect(0)
    message = receiver.deliver(0, header=b"\xc1")
    finish(unpacker)
    with pytest.raises(ValueError, match="not a msgpack map"):
        receiver.ahead.take(message)


def test_a_task_that_waits_behind_another_is_done_by_who_needs_it(receiver, unpacker):
    blocked = threading.Event()
    blocker = unpacker.submit(lambda: blocked.wait(10))
    receiver.expect(0)
    message = receiver.deliver(0)
    assert receiver.ahead.take(message) is None
    blocked.set()
    assert blocker.result(timeout=10)
