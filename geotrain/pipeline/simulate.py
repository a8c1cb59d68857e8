"""A step in simulated time: the runtime's own rule over stages and links that are only numbers.

Every stage asks `next_kind`, as the runtime does, with the same notion of what is ready: the input
is there, the window has room, and the output has a slot. Tensors of one direction of a boundary
queue for the link, travel, and arrive in order.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import NamedTuple

from geotrain.pipeline.schedule import Action, Compute, Kind, next_kind
from geotrain.pipeline.timed import Timed, Trace, timed_runs

_SAME_S = 1e-9
"""Events this close happen at once: sums of the same times in another order differ by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """How long a stage takes for a microbatch, in seconds; several values are a distribution."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]

    def __post_init__(self) -> None:
        assert self.forward_s and self.backward_s
        assert min(self.forward_s) >= 0 and min(self.backward_s) >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One direction of a boundary."""

    latency_s: float
    """One way, for a message that has the link to itself."""
    transfer_s: float = 0.0
    """How long a microbatch's tensor occupies the link."""
    jitter_s: Sequence[float] = (0.0,)
    """What is added to the latency; several values are a distribution."""
    other_load: float = 0.0
    """Share of the link's rate that other traffic takes, below 1."""
    slots: int | None = None
    """Tensors that may be on their way or not yet taken by the receiver; None: no limit."""

    def __post_init__(self) -> None:
        assert self.latency_s >= 0 and self.transfer_s >= 0 and min(self.jitter_s) >= 0
        assert 0 <= self.other_load < 1 and (self.slots is None or self.slots >= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The edge between two stages."""

    forward: Direction
    backward: Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """Everything about a line of stages that its plan does not choose."""

    stages: Sequence[StageTimes]
    boundaries: Sequence[Boundary]
    decides_ahead: bool = False
    """On a GPU the host chooses an action when the one ahead of it has started, not ended."""

    def __post_init__(self) -> None:
        assert self.stages and len(self.boundaries) == len(self.stages) - 1


class Run(NamedTuple):
    """One action as it ran; all times in seconds since the step began."""

    kind: Compute
    microbatch: int
    begin_s: float
    end_s: float


class Delivery(NamedTuple):
    """One tensor's way over a boundary."""

    sent_s: float
    """Handed to the link; it may queue from here on."""
    clear_s: float
    """Its last byte has left."""
    arrived_s: float


@dataclass(frozen=True)
class Simulated:
    """What a step would be."""

    runs: Sequence[Sequence[Run]]
    """One list a stage, in order."""
    forward: Sequence[Sequence[Delivery]]
    """One list a boundary, by microbatch: activations."""
    backward: Sequence[Sequence[Delivery]]
    """The same for gradients."""
    decided_s: Sequence[float]
    """When each stage has every region's vote."""
    peak_in_flight: Sequence[int]

    @property
    def step_s(self) -> float:
        """From its beginning to the first stage's decision, when the next step may begin."""
        return self.decided_s[0]

    def span_s(self, stage: int) -> tuple[float, float]:
        """When a stage could begin, and when the step was over."""
        return 0.0, self.step_s

    def busy_s(self, stage: int) -> float:
        return sum(run.end_s - run.begin_s for run in self.runs[stage])

    @cached_property
    def trace(self) -> Trace:
        """Every action, with sending and receiving."""
        timed = [each for stage, runs in enumerate(self.runs) for each in timed_runs(stage, runs)]
        for boundary in range(len(self.forward)):
            for way, kind, sender in (
                (self.forward, "F", boundary),
                (self.backward, "B", boundary + 1),
            ):
                receiver = 2 * boundary + 1 - sender
                send: Kind = "SEND_F" if kind == "F" else "SEND_B"
                receive: Kind = "RECV_F" if kind == "F" else "RECV_B"
                for microbatch, each in enumerate(way[boundary]):
                    timed.append(_timed(sender, send, microbatch, each.sent_s, each.clear_s))
                    timed.append(_timed(receiver, receive, microbatch, *[each.arrived_s] * 2))
        return Trace.of(timed)


def _timed(stage: int, kind: Kind, microbatch: int, begin_s: float, end_s: float) -> Timed:
    action = Action(stage=stage, kind=kind, microbatch=microbatch)
    return Timed(action=action, begin_s=begin_s, end_s=end_s)


def simulate(
    model: PipelineModel,
    *,
    num_microbatches: int,
    windows: Sequence[int],
    rng: Random | None = None,
) -> Simulated:
    """Run one step.

    Args:
        windows: One a stage; at least 1.
        rng: Draws from the distributions. Without one their values are taken in turn.
    """
    assert num_microbatches >= 1 and len(windows) == len(model.stages) and min(windows) >= 1
    return _Simulation(model, num_microbatches, windows, rng).run()


class _Way:
    """One direction of a boundary while the step runs."""

    __slots__ = (
        "arrived", "deliveries", "free_s", "jitter", "last_s", "latency_s", "receiver",
        "returning_s", "sender", "slots", "transfer_s", "unreleased",
    )  # fmt: skip

    def __init__(
        self, direction: Direction, opposite: Direction, sender: int, receiver: int
    ) -> None:
        self.sender, self.receiver = sender, receiver
        self.latency_s, self.returning_s = direction.latency_s, opposite.latency_s
        self.transfer_s = direction.transfer_s / (1.0 - direction.other_load)
        self.slots = direction.slots
        self.jitter: Sequence[float] = ()
        self.free_s = self.last_s = 0.0
        self.arrived = self.unreleased = 0
        self.deliveries: list[Delivery] = []

    @property
    def has_slot(self) -> bool:
        return self.slots is None or self.unreleased < self.slots

    def send(self, now: float, transfer_s: float, jitter_s: float) -> Delivery:
        clear_s = max(now, self.free_s) + transfer_s
        self.free_s = clear_s
        # In order: what is lost or late holds up what comes behind it.
        self.last_s = max(self.last_s, clear_s + self.latency_s + jitter_s)
        return Delivery(now, clear_s, self.last_s)


class _Stage:
    """One stage while the step runs; counts are of actions chosen, which may not have run yet."""

    __slots__ = (
        "backwards", "busy", "chosen", "down_in", "down_out", "ended", "forwards", "last", "peak",
        "runs", "times", "up_in", "up_out", "window",
    )  # fmt: skip

    def __init__(self, times: dict[Compute, Sequence[float]], window: int) -> None:
        self.times, self.window = times, window
        self.forwards = self.backwards = self.peak = self.ended = 0
        self.last: Kind | None = None
        self.chosen: tuple[Compute, int] | None = None
        self.busy = False
        self.runs: list[Run] = []
        self.up_in: _Way | None = None
        self.up_out: _Way | None = None
        self.down_in: _Way | None = None
        self.down_out: _Way | None = None


_ENDS, _ARRIVES, _RELEASED = range(3)


class _Simulation:
    def __init__(
        self,
        model: PipelineModel,
        num_microbatches: int,
        windows: Sequence[int],
        rng: Random | None,
    ) -> None:
        def draw(values: Sequence[float]) -> Sequence[float]:
            if len(values) == 1:
                return [values[0]] * num_microbatches
            if rng is not None:
                return rng.choices(values, k=num_microbatches)
            return [values[index % len(values)] for index in range(num_microbatches)]

        self._count = num_microbatches
        self._ahead = model.decides_ahead
        self._stages = [
            _Stage({"F": draw(times.forward_s), "B": draw(times.backward_s)}, window)
            for times, window in zip(model.stages, windows, strict=True)
        ]
        self._forward: list[_Way] = []
        self._backward: list[_Way] = []
        for index, each in enumerate(model.boundaries):
            there = _Way(each.forward, each.backward, index, index + 1)
            back = _Way(each.backward, each.forward, index + 1, index)
            there.jitter, back.jitter = draw(each.forward.jitter_s), draw(each.backward.jitter_s)
            upper, lower = self._stages[index], self._stages[index + 1]
            upper.down_out = lower.up_in = there
            upper.down_in = lower.up_out = back
            self._forward.append(there)
            self._backward.append(back)
        self._events: list[tuple[float, int, int, int, _Way | None]] = []
        self._num_events = 0

    def run(self) -> Simulated:
        stages, events = self._stages, self._events
        for index in range(len(stages)):
            self._advance(stages[index], index, 0.0)
        while events:
            now = events[0][0]
            touched = [self._handle(heapq.heappop(events))]
            while events and events[0][0] <= now + _SAME_S:
                touched.append(self._handle(heapq.heappop(events)))
            for index in touched if len(touched) == 1 else sorted(set(touched)):
                self._advance(stages[index], index, now)
        assert all(stage.ended == 2 * self._count for stage in stages), "a step that deadlocks"
        return self._result()

    def _handle(self, event: tuple[float, int, int, int, _Way | None]) -> int:
        """Let something happen. Returns the stage that may go on by it."""
        at, _, what, index, way = event
        if way is None:
            self._end(self._stages[index], at)
        elif what == _ARRIVES:
            way.arrived += 1
        else:
            way.unreleased -= 1
        return index

    def _push(self, at: float, what: int, index: int, way: _Way | None = None) -> None:
        self._num_events += 1  # among equal times the first pushed is the first out
        heapq.heappush(self._events, (at, self._num_events, what, index, way))

    def _advance(self, stage: _Stage, index: int, now: float) -> None:
        """Choose and start what can be; on a GPU one action is chosen while another runs."""
        while True:
            if stage.chosen is None and (self._ahead or not stage.busy):
                stage.chosen = self._choose(stage, now)
            if stage.chosen is None or stage.busy:
                return
            kind, number = stage.chosen
            stage.chosen, stage.busy = None, True
            end_s = now + stage.times[kind][number]
            stage.runs.append(Run(kind, number, now, end_s))
            self._push(end_s, _ENDS, index)

    def _choose(self, stage: _Stage, now: float) -> tuple[Compute, int] | None:
        forwards, backwards = stage.forwards, stage.backwards
        down_out, up_in, up_out, down_in = stage.down_out, stage.up_in, stage.up_out, stage.down_in
        kind = next_kind(
            last=stage.last,
            forward_ready=forwards < self._count
            and (down_out is None or down_out.has_slot)
            and (up_in is None or up_in.arrived > forwards),
            backward_ready=backwards < forwards
            and (up_out is None or up_out.has_slot)
            and (down_in is None or down_in.arrived > backwards),
            in_flight=forwards - backwards,
            window=stage.window,
        )
        if kind is None:
            return None
        stage.last = kind
        if kind == "F":
            stage.forwards = forwards + 1
            stage.peak = max(stage.peak, forwards + 1 - backwards)
            takes, gives, number = up_in, down_out, forwards
        else:
            stage.backwards = backwards + 1
            takes, gives, number = down_in, up_out, backwards
        if takes is not None and takes.slots is not None:
            # The receiver has taken it; word of that frees the sender's slot a latency later.
            self._push(now + takes.returning_s, _RELEASED, takes.sender, takes)
        if gives is not None:
            gives.unreleased += 1
        return kind, number

    def _end(self, stage: _Stage, now: float) -> None:
        run = stage.runs[-1]
        stage.busy = False
        stage.ended += 1
        way = stage.down_out if run.kind == "F" else stage.up_out
        if way is not None:
            delivery = way.send(now, way.transfer_s, way.jitter[run.microbatch])
            way.deliveries.append(delivery)
            self._push(delivery.arrived_s, _ARRIVES, way.receiver, way)

    def _result(self) -> Simulated:
        """Votes go up behind the last gradient of each boundary, the decision comes down."""
        votes_s = 0.0
        for index in reversed(range(len(self._stages))):
            votes_s = max(votes_s, self._stages[index].runs[-1].end_s)
            if index > 0:
                votes_s = self._backward[index - 1].send(votes_s, 0.0, 0.0).arrived_s
        decided_s = [votes_s]
        for way in self._forward:
            decided_s.append(decided_s[-1] + way.latency_s)
        return Simulated(
            runs=[stage.runs for stage in self._stages],
            forward=[way.deliveries for way in self._forward],
            backward=[way.deliveries for way in self._backward],
            decided_s=decided_s,
            peak_in_flight=[stage.peak for stage in self._stages],
        )
