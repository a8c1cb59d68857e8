"""Real runtimes, edges, streams and rings in a line, with deliveries in any order: no deadlock."""

import random
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.pipeline.edge import Edge, Neighbour
from geotrain.pipeline.group import Group
from geotrain.pipeline.inputs import Inputs
from geotrain.pipeline.parcel import Codecs
from geotrain.pipeline.runtime import Account, Runtime, Work
from geotrain.pipeline.stage import Weight
from geotrain.pipeline.trace import most_in_flight
from geotrain.transport.attachment_incoming import InStream
from geotrain.transport.attachment_streams import OutStream
from geotrain.transport.flow import Ring
from geotrain.transport.messages import BACKWARD, FORWARD, Message, stream_id

VIEW = 7
LOCK = threading.RLock()


class Wire:
    """One stream between two ranks: what the daemons and the WAN would do, one step at a time."""

    def __init__(self, stream, out_bytes, in_bytes):
        self.sent, self.released = deque(), deque()
        self.source = bytearray(out_bytes)
        self.target = bytearray(in_bytes)
        self.ring = Ring(in_bytes)
        self.starts = {}
        self.out = OutStream(
            stream=stream, memory=memoryview(self.source), lock=LOCK, post=self.sent.append
        )
        self.incoming = InStream(
            stream=stream, memory=memoryview(self.target), lock=LOCK, post=self.released.append
        )
        self.out.open(VIEW, in_bytes)
        self.incoming.open(VIEW)

    def deliver(self):
        record = self.sent.popleft()
        message = Message.from_map(record["message"])
        source = record["message"]["start"]
        if message.payload_bytes:
            assert self.ring.fits(message.payload_bytes), "sent without credit"
            start = self.ring.allocate(message.payload_bytes)
            self.starts[message.seq] = start
            size = message.payload_bytes
            self.target[start : start + size] = self.source[source : source + size]
            message = replace(message, start=start)
        self.incoming.on_delivered(message, board_view=VIEW)

    def acknowledge(self):
        seqs = self.released.popleft()["seqs"]
        for seq in seqs:
            if seq in self.starts:
                self.ring.free(self.starts.pop(seq))
        self.out.on_acked(VIEW, seqs, [1] * len(seqs))

    def events(self):
        return [self.deliver] * bool(self.sent) + [self.acknowledge] * bool(self.released)


class Place:
    """Stands where an attachment does."""

    def __init__(self, wires):
        self._wires = wires

    def out(self, stream):
        return self._wires[stream].out

    def incoming(self, stream):
        return self._wires[stream].incoming

    def nudge(self):
        """Nobody waits here."""


class LateWorker:
    """Does what it is given when it is told to: its delay is one more event among the others."""

    def __init__(self):
        self._calls = deque()

    def submit(self, call):
        future = Future()
        self._calls.append((call, future))
        return future

    def work(self):
        call, future = self._calls.popleft()
        if future.set_running_or_notify_cancel():
            future.set_result(call())

    def events(self):
        return [self.work] * bool(self._calls)


class FakeStage:
    """Puts out tensors of drawn sizes whose first value names the microbatch."""

    def __init__(self, rng, sizes, *, last, frozen):
        self._rng, self._sizes, self._last, self._frozen = rng, sizes, last, frozen
        self.held = {}
        self.most_held = 0
        self.order = []

    def is_held(self, microbatch):
        return microbatch in self.held

    def expects_gradient(self, microbatch):
        return not self._last

    def forward(self, inputs, targets, *, mode, step, microbatch, weight):
        assert inputs[0].item() == microbatch == targets[0].item()
        self.order.append(f"F{microbatch}")
        if not self._frozen:
            self.held[microbatch] = inputs.requires_grad
            self.most_held = max(self.most_held, len(self.held))
        size = self._rng.choice(self._sizes)
        output = torch.full((size,), float(microbatch))
        # Of autograd's making, so that it is packed later; or a leaf, as a user's buffer is one.
        output.requires_grad_(not self._frozen)
        return output * 1 if self._rng.random() < 0.7 else output

    def backward(self, grads, *, mode, step, microbatch):
        wanted = self.held.pop(microbatch)
        if not self._last:
            assert grads[0][0].item() == microbatch
        self.order.append(f"B{microbatch}")
        return [torch.full((self._rng.choice(self._sizes),), float(microbatch))], wanted


class Around:
    def set_action(self, text, *, key=None, microbatch=None):
        pass


def build_line(rng, *, num_stages, ring_bytes, sizes, windows, frozen_first, packers, unpackers):
    wires = {}
    for boundary in range(num_stages - 1):
        for direction in (FORWARD, BACKWARD):
            stream = stream_id(boundary, direction)
            wires[stream] = Wire(stream, rng.choice(ring_bytes), rng.choice(ring_bytes))
    place = Place(wires)
    codecs = Codecs(activations="none", gradients="planes")
    stages, runtimes = [], []
    for index in range(num_stages):

        def edge(boundary, direction, packer=packers[index], unpacker=unpackers[index]):
            neighbour = Neighbour(name="next", own_name="own", boundary=boundary)
            return Edge(
                place,
                neighbour,
                direction=direction,
                codecs=codecs,
                packer=packer,
                unpacker=unpacker,
            )

        up = edge(index - 1, BACKWARD) if index > 0 else None
        down = edge(index, FORWARD) if index < num_stages - 1 else None
        stage = FakeStage(
            rng, sizes, last=index == num_stages - 1, frozen=frozen_first and index == 0
        )
        stages.append(stage)
        runtime = Runtime(
            stage,
            index=index,
            upstream=up,
            downstream=down,
            inputs=Inputs(worker=unpackers[index], device=torch.device("cpu")),
            group=Group(rank=0, size=1),
            device=torch.device("cpu"),
            surroundings=Around(),
        )
        runtimes.append(runtime)
    return wires, stages, runtimes


def run_line(rng, wires, workers, runtimes):
    """Fire enabled events in random order until all is done; a deadlock is an assertion.

    Returns what each stage ran.
    """
    accounts = {runtime: Account() for runtime in runtimes}
    while True:
        for runtime in runtimes:
            runtime.pump()
        if all(runtime.is_done for runtime in runtimes):
            return [account.trace for account in accounts.values()]
        places = [*wires.values(), *workers]
        events = [event for place in places for event in place.events()]
        choices = events + [runtime for runtime in runtimes if not runtime.is_done]
        while choices:
            choice = choices.pop(rng.randrange(len(choices)))
            if isinstance(choice, Runtime):
                if choice.advance(accounts[choice]):
                    break
            else:
                choice()
                break
        else:
            raise AssertionError("deadlock: nothing can happen, and the step is not done")


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_stages=st.integers(2, 4),
    num_microbatches=st.integers(1, 7),
    ring_pages=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    floats=st.lists(st.integers(1, 12_000), min_size=1, max_size=3),
    windows=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    rooms=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    frozen_first=st.booleans(),
    training=st.booleans(),
)
def test_no_arrival_order_deadlocks_and_windows_and_memory_hold(
    seed, num_stages, num_microbatches, ring_pages, floats, windows, rooms, frozen_first, training
):
    rng = random.Random(seed)
    packers = [LateWorker() for _ in range(num_stages)]
    unpackers = [LateWorker() for _ in range(num_stages)]
    wires, stages, runtimes = build_line(
        rng,
        num_stages=num_stages,
        ring_bytes=[4096 * pages for pages in ring_pages],
        sizes=floats,
        windows=windows,
        frozen_first=frozen_first or not training,
        packers=packers,
        unpackers=unpackers,
    )
    if not training:
        for stage in stages:
            stage._frozen = True
    batches = [
        (torch.full((3,), float(m)), torch.full((2,), float(m))) for m in range(num_microbatches)
    ]
    for index, runtime in enumerate(runtimes):
        runtime.room = lambda most=rooms[index]: most
        runtime.start(
            Work(
                mode="forward" if training else "evaluate",
                step=5,
                num_microbatches=num_microbatches,
                window=windows[index],
                weight=Weight(num_targets=1.0),
                microbatches=batches if index == 0 else (),
            )
        )
    traces = run_line(rng, wires, [*packers, *unpackers], runtimes)
    for stage, window, room, trace in zip(stages, windows, rooms, traces, strict=False):
        assert stage.most_held <= min(window, room)
        assert [f"{action.kind}{action.microbatch}" for action in trace] == stage.order
        assert most_in_flight(trace) == stage.most_held
        assert [a for a in stage.order if a[0] == "F"] == [f"F{m}" for m in range(num_microbatches)]
        backwards = [a for a in stage.order if a[0] == "B"]
        expected = 0 if stage._frozen else num_microbatches
        assert backwards == [f"B{m}" for m in range(expected)]
