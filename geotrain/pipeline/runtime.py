"""Every forward and backward of one step (or one evaluation batch) in this region."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from geotrain.errors import RegionError
from geotrain.pipeline.edge import Edge
from geotrain.pipeline.group import Group
from geotrain.pipeline.inputs import Inputs
from geotrain.pipeline.microbatch import tree_bytes
from geotrain.pipeline.schedule import Action, Kind, next_kind
from geotrain.pipeline.stage import Stage, Weight
from geotrain.pipeline.trace import TracedAction

_WORDS: dict[Kind, str] = {"F": "forward", "B": "backward"}
_CALLS = {"forward": "step", "evaluate": "evaluation batch"}


class Surroundings(Protocol):
    """What the runtime needs of the region around it."""

    def set_action(
        self, text: str, *, key: str | None = None, microbatch: int | None = None
    ) -> None:
        """Post what this rank is doing, for status and for the other regions."""
        ...

    def wait(self, what: str, *, since: float, needs: Sequence[Edge]) -> None:
        """Wait for news on an edge. Raises RegionError when the run cannot go on.

        Args:
            needs: Edges without which it will not come; their neighbours must not have left.
        """
        ...

    def error(self, kind: str, detail: str) -> RegionError:
        """An error of that kind at the current place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One batch through the pipeline."""

    mode: str
    """"forward" in a training step, "evaluate" in an evaluation: the kind of its messages."""
    step: int
    """The step, or the number of the batch in an evaluation: the key of its messages."""
    num_microbatches: int
    window: int
    weight: Weight
    microbatches: Sequence[tuple[Any, Any]] = ()
    """(inputs, targets) of each microbatch, views of the batch; in the first region only."""

    @property
    def training(self) -> bool:
        return self.mode == "forward"


_NOTHING = Work(
    mode="forward", step=0, num_microbatches=0, window=1, weight=Weight(num_targets=1.0)
)


@dataclass(slots=True)
class Account:
    """What the region did and how long it took."""

    trace: list[TracedAction] = field(default_factory=list)
    compute_s: float = 0.0
    transfer_s: float = 0.0
    """Copying and coding between tensors and the arena."""
    arena_s: float = 0.0
    """Waiting for nothing but a slot to put an output into."""


class Runtime:
    """Runs this region's actions by the alternating rule until the batch is through."""

    def __init__(
        self,
        stage: Stage,
        *,
        index: int,
        upstream: Edge | None,
        downstream: Edge | None,
        inputs: Inputs,
        group: Group,
        device: torch.device,
        surroundings: Surroundings,
    ) -> None:
        self._stage = stage
        self._index = index
        self._up = upstream
        self._down = downstream
        self._edges = [edge for edge in (upstream, downstream) if edge is not None]
        self._inputs = inputs
        self._group = group
        self._device = device
        self._around = surroundings
        self.room: Callable[[], int] = lambda: sys.maxsize
        """The most microbatches in flight that there is memory for, where somebody knows."""
        self._work = _NOTHING
        self._awaiting: list[int] = []
        self._next_forward = 0
        self._last: Kind | None = None

    def run(self, work: Work, account: Account) -> None:
        """Run all actions of this region for one batch, in the order that the rule finds."""
        self.start(work)
        waiting_since: float | None = None
        while not self.is_done:
            if self.advance(account):
                waiting_since = None
                continue
            waiting_since = waiting_since or time.monotonic()
            self._wait(waiting_since, account)

    def start(self, work: Work) -> None:
        """Take up a batch; nothing of it has run."""
        self._work = work
        self._inputs.start(work.microbatches)
        self._awaiting = []
        self._next_forward = 0
        self._last = None

    @property
    def is_done(self) -> bool:
        """Whether every action of the batch has run."""
        return self._next_forward >= self._work.num_microbatches and not self._awaiting

    def advance(self, account: Account) -> bool:
        """Run the next action if one is ready; False when there is nothing to do but wait."""
        self.pump()
        action = self._group.agree(self._choose(self._work))
        if action is None:
            return False
        text = f"{_WORDS[action.kind]} {action} of {_CALLS[self._work.mode]} {self._work.step}"
        self._around.set_action(text, key=text, microbatch=action.microbatch)
        with torch.set_grad_enabled(self._work.training):
            self._execute(action, self._work, account)
        self._last = action.kind
        return True

    def pump(self) -> None:
        """Take in what came on both edges, and put out what waited for room."""
        for edge in self._edges:
            edge.pump()

    # ---- choosing

    def _choose(self, work: Work) -> Action | None:
        kind = next_kind(
            last=self._last,
            forward_ready=self._forward_ready(work),
            backward_ready=self._backward_ready(work),
            in_flight=self._in_flight(work),
            window=min(work.window, self.room()),
        )
        if kind is None:
            return None
        microbatch = self._next_forward if kind == "F" else self._awaiting[0]
        return Action(stage=self._index, kind=kind, microbatch=microbatch)

    def _in_flight(self, work: Work) -> int:
        """Forwards whose backward is due, or, where none will come, whose output is untaken."""
        if self._awaiting or self._down is None:
            return len(self._awaiting)
        return self._down.unreleased(work.mode)

    def _forward_ready(self, work: Work) -> bool:
        microbatch = self._next_forward
        if microbatch >= work.num_microbatches:
            return False
        # Readiness owns the slots: an action that could not hand over its output is not ready.
        if self._down is not None and not self._down.can_send():
            return False
        return self._up is None or self._up.has(work.mode, work.step, microbatch)

    def _backward_ready(self, work: Work) -> bool:
        if not self._awaiting:
            return False
        microbatch = self._awaiting[0]
        if self._up is not None and not self._up.can_send():
            return False
        if self._down is None or not self._stage.expects_gradient(microbatch):
            return True
        return self._down.has("backward", work.step, microbatch)

    def _wait(self, since: float, account: Account) -> None:
        work = self._work
        if self._awaiting and not self._backward_ready(work):
            what = f"backward {self._awaiting[0]} of {_CALLS[work.mode]} {work.step}"
        else:
            what = f"forward {self._next_forward} of {_CALLS[work.mode]} {work.step}"
        lacks_slot = self._lacks_slot(work)
        began = time.monotonic()
        self._around.wait(what, since=since, needs=self._edges)
        if lacks_slot:
            account.arena_s += time.monotonic() - began

    def _lacks_slot(self, work: Work) -> bool:
        """Whether an action has its input and its place in the window, but its output no room."""
        if self._awaiting and self._up is not None and not self._up.can_send():
            microbatch = self._awaiting[0]
            if (
                self._down is None
                or not self._stage.expects_gradient(microbatch)
                or self._down.has("backward", work.step, microbatch)
            ):
                return True
        return (
            self._down is not None
            and not self._down.can_send()
            and self._next_forward < work.num_microbatches
            and self._in_flight(work) < work.window
            and (self._up is None or self._up.has(work.mode, work.step, self._next_forward))
        )

    # ---- acting

    def _execute(self, action: Action, work: Work, account: Account) -> None:
        begin = time.monotonic()
        came_s, input_bytes = self._arrival(action, work)
        if action.kind == "F":
            compute_s = self._forward(action.microbatch, work)
        else:
            compute_s = self._backward(action.microbatch, work)
        end = time.monotonic()
        account.trace.append(
            TracedAction(
                kind=action.kind,
                microbatch=action.microbatch,
                begin_s=begin,
                end_s=end,
                came_s=came_s,
                input_bytes=input_bytes if action.kind == "F" else 0,
            )
        )
        account.compute_s += compute_s
        account.transfer_s += end - begin - compute_s

    def _arrival(self, action: Action, work: Work) -> tuple[float | None, int]:
        """When what the action takes had come, and its bytes."""
        microbatch = action.microbatch
        if action.kind == "F":
            if self._up is not None:
                return self._up.arrival(work.mode, work.step, microbatch)
            return None, tree_bytes(work.microbatches[microbatch][0])
        if self._down is not None and self._stage.expects_gradient(microbatch):
            return self._down.arrival("backward", work.step, microbatch)
        return None, 0

    def _forward(self, microbatch: int, work: Work) -> float:
        if self._up is None:
            inputs, targets = self._inputs.take(microbatch)
        else:
            inputs, targets = self._up.take(work.mode, work.step, microbatch, device=self._device)
        began = time.monotonic()
        output = self._stage.forward(
            inputs,
            targets,
            mode=work.mode,
            step=work.step,
            microbatch=microbatch,
            weight=work.weight,
        )
        compute_s = time.monotonic() - began
        if self._down is not None:
            self._down.send(
                work.mode, step=work.step, microbatch=microbatch, tree=output, side=targets
            )
        self._next_forward += 1
        if self._stage.is_held(microbatch):
            self._awaiting.append(microbatch)
        return compute_s

    def _backward(self, microbatch: int, work: Work) -> float:
        grads: list[torch.Tensor | None] = []
        if self._down is not None and self._stage.expects_gradient(microbatch):
            grads, _ = self._down.take("backward", work.step, microbatch, device=self._device)
        began = time.monotonic()
        input_grads, wanted = self._stage.backward(
            grads, mode=work.mode, step=work.step, microbatch=microbatch
        )
        compute_s = time.monotonic() - began
        self._awaiting.pop(0)
        if self._up is not None and wanted:
            self._up.send("backward", step=work.step, microbatch=microbatch, tree=input_grads)
        return compute_s
