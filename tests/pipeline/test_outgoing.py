"""What an edge has to send: in order, never without room, and nothing half changed."""

import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.errors import RegionError
from geotrain.pipeline import outgoing
from geotrain.pipeline.edge import Edge, Neighbour
from geotrain.pipeline.outgoing import Outbox
from geotrain.pipeline.parcel import Codecs, pack_tree
from geotrain.pipeline.worker import Worker
from geotrain.transport import attachment_streams
from geotrain.transport.attachment_incoming import InStream
from geotrain.transport.attachment_streams import OutStream
from geotrain.transport.messages import FORWARD

VIEW = 3
CODECS = Codecs(activations="none", gradients="none")


class LateWorker:
    """Does what it is given when it is told to."""

    def __init__(self):
        self.calls = deque()

    def submit(self, call):
        self.calls.append(call)
        return Future()

    def work(self):
        self.calls.popleft()()


class Sender:
    """An outbox over a real stream whose records go nowhere."""

    def __init__(self, *, worker, ring_bytes=1 << 16):
        self.records = []
        self.nudges = 0
        self.stream = OutStream(
            stream=0,
            memory=memoryview(bytearray(ring_bytes)),
            lock=threading.RLock(),
            post=self.records.append,
        )
        self.stream.open(VIEW, ring_bytes)
        self.outbox = Outbox(self.stream, worker=worker, nudge=self.nudge)

    def nudge(self):
        self.nudges += 1

    def send(self, microbatch, tensor, *, later):
        key = ("forward", 1, microbatch)
        if later:
            self.outbox.send_later(key, lambda: packed(tensor), unchanged=[tensor])
        else:
            self.outbox.send(key, lambda: packed(tensor))

    def sent(self):
        return [(r["message"]["kind"], r["message"]["microbatch"]) for r in self.records]


def packed(tensor):
    return pack_tree(tensor, None, role="activation", codecs=CODECS)


@pytest.fixture
def worker():
    return LateWorker()


@given(
    kinds=st.lists(st.sampled_from(["later", "now", "record"]), min_size=1, max_size=8),
    works=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_messages_go_in_the_order_in_which_they_were_sent(kinds, works):
    worker = LateWorker()
    sender = Sender(worker=worker)
    expected = []
    for number, (kind, times) in enumerate(zip(kinds, works, strict=False)):
        if kind == "record":
            sender.outbox.send_record(("vote", 1, -1), {"number": number})
            expected.append(("vote", -1))
        else:
            sender.send(number, torch.full((500,), 1.0), later=kind == "later")
            expected.append(("forward", number))
        for _ in range(min(times, len(worker.calls))):
            worker.work()
        assert sender.sent() == expected[: len(sender.sent())]
        assert sender.outbox.is_flushed == (len(sender.sent()) == len(expected))
    while worker.calls:
        worker.work()
    sender.outbox.pump()
    assert sender.sent() == expected and sender.outbox.is_flushed


def test_beside_one_that_is_being_packed_there_must_be_room_for_both(worker):
    # Four parts of a quarter of the ring fit, which is the largest message in one part.
    sender = Sender(worker=worker, ring_bytes=1 << 16)
    size = torch.zeros((1 << 14) // 4)
    sender.send(0, size, later=False)
    sender.send(1, size, later=True)
    assert sender.outbox.can_send()
    sender.send(2, size, later=True)
    assert not sender.outbox.can_send(), "two wait already"
    worker.work()
    worker.work()
    assert sender.outbox.can_send(), "one more fits"
    sender.send(3, size, later=True)
    assert not sender.outbox.can_send()
    worker.work()
    assert not sender.outbox.can_send() and sender.outbox.is_flushed


def test_before_the_first_is_packed_nobody_knows_what_fits(worker):
    sender = Sender(worker=worker)
    sender.send(0, torch.zeros(2000), later=True)
    assert not sender.outbox.can_send()
    worker.work()
    assert sender.outbox.can_send()


def test_what_finds_no_room_is_kept_until_there_is(worker):
    sender = Sender(worker=worker, ring_bytes=1 << 14)
    sender.send(0, torch.zeros(4096), later=True)  # the whole ring, in four parts
    sender.send(1, torch.ones(4096), later=True)
    worker.work()
    worker.work()
    assert {m for _, m in sender.sent()} == {0} and not sender.outbox.is_flushed
    assert sender.outbox.unreleased("forward") >= 2
    sender.stream.on_acked(VIEW, [0, 1, 2, 3], [1, 1, 1, 1])
    sender.outbox.pump()
    assert sender.sent() == [("forward", 0)] * 4 + [("forward", 1)] * 4
    assert sender.outbox.is_flushed


def test_packing_is_news_until_it_is_looked_at(worker):
    sender = Sender(worker=worker)
    sender.send(0, torch.zeros(10), later=True)
    assert not sender.outbox.has_news() and sender.nudges == 0
    worker.work()
    assert sender.outbox.has_news() and sender.nudges == 1
    sender.outbox.pump()
    assert not sender.outbox.has_news()


def test_what_packing_took_counts_as_a_part_of_the_way(worker, monkeypatch):
    now = SimpleNamespace(s=100.0)
    for module in (outgoing, attachment_streams):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s))
    sender = Sender(worker=worker)
    sender.send(0, torch.zeros(2000), later=True)
    sender.send(1, torch.zeros(2000), later=False)
    now.s = 100.5
    worker.work()
    now.s = 101.0
    sender.stream.on_acked(VIEW, [0, 1], [1, 1])
    assert [each.sent_s for each in sender.stream.take_passages()] == [100.0, 100.5]


def test_an_error_of_packing_is_raised_by_whoever_computes(worker):
    sender = Sender(worker=worker)

    def fails():
        raise ValueError("no such layout")

    sender.outbox.send_later(("forward", 1, 0), fails, unchanged=[])
    worker.work()
    assert sender.outbox.has_news() and sender.nudges == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="no such layout"):
            sender.outbox.pump()


class Place:
    """Stands where an attachment does."""

    def __init__(self):
        lock, records = threading.RLock(), []
        self.stream = OutStream(
            stream=0, memory=memoryview(bytearray(1 << 16)), lock=lock, post=records.append
        )
        self.stream.open(VIEW, 1 << 16)
        self.backwards = InStream(
            stream=1, memory=memoryview(bytearray(1 << 16)), lock=lock, post=records.append
        )

    def out(self, stream):
        return self.stream

    def incoming(self, stream):
        return self.backwards

    def nudge(self):
        """Nobody waits here."""


def edge_of(worker):
    return Edge(
        Place(),
        Neighbour(name="frankfurt", own_name="virginia", boundary=0),
        direction=FORWARD,
        codecs=CODECS,
        packer=worker,
        unpacker=worker,
    )


@pytest.fixture
def edge(worker):
    return edge_of(worker)


def put_out(edge, tree, kind="forward"):
    edge.send(kind, step=1, microbatch=4, tree=tree)


@pytest.mark.parametrize("change", ["add_", "zero_", "mul_"])
def test_a_tensor_changed_before_it_is_sent_is_named_and_not_sent_silently(edge, worker, change):
    out = torch.ones(2000, requires_grad=True) * 1
    put_out(edge, {"h": out})
    with torch.no_grad():
        getattr(out, change)(*([] if change == "zero_" else [2.0]))
    worker.work()
    with pytest.raises(RegionError, match=r"in place.*put out a clone") as caught:
        edge.pump()
    assert caught.value.microbatch == 4 and caught.value.region == "virginia"


def test_one_changed_once_it_was_seen_packed_is_nobodys_business(edge, worker):
    out = torch.ones(2000, requires_grad=True) * 1
    put_out(edge, out)
    worker.work()
    edge.pump()
    with torch.no_grad():
        out.zero_()
    edge.pump()


@pytest.mark.parametrize(
    "tree",
    [
        torch.ones(2000),
        torch.ones(2000, requires_grad=True),
        (torch.ones(2000, requires_grad=True) * 1, torch.arange(5)),
    ],
    ids=["no graph", "a leaf", "one of two"],
)
def test_what_may_be_a_buffer_of_the_users_is_read_at_once(edge, worker, tree):
    put_out(edge, tree)
    assert not worker.calls and edge.is_flushed


def test_a_gradient_is_ours(edge, worker):
    put_out(edge, [torch.ones(2000), torch.ones(3)], kind="backward")
    assert len(worker.calls) == 1 and not edge.is_flushed


def test_what_cannot_cross_is_named_by_the_next_look():
    worker = Worker("geotrain-packer")
    edge = edge_of(worker)
    put_out(edge, torch.ones(3, requires_grad=True) * 1)
    put_out(edge, [torch.ones(3, requires_grad=True) * 1])
    worker.close()
    with pytest.raises(RegionError, match="same structure"):
        edge.pump()
