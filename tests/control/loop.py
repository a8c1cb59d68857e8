"""A controller in a loop with simulated steps: what it measures is what its windows made."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from geotrain.control.controller import Controller
from geotrain.control.ideal import Costs
from geotrain.pipeline.simulate import PipelineModel, simulate
from geotrain.pipeline.window import classic_windows
from tests.control.measured_line import Reporter
from tests.pipeline.lines import equal_stages

NAMES = ("virginia", "frankfurt", "tokyo", "sydney")


class Loop:
    """Steps under the windows that the controller last chose, from the classic ones on."""

    def __init__(self, model_at: Callable[[int], PipelineModel], *, count: int = 32) -> None:
        self._model_at, self._count = model_at, count
        num_stages = len(model_at(1).stages)
        self.controller = Controller(NAMES[:num_stages])
        self.windows = classic_windows(num_stages)
        self._reporter = Reporter()
        self.step_s: list[float] = []
        self.compares = False
        self.best_s: list[float] = []
        """Where it compares: the same steps with windows that are wide enough for anything."""
        self.changes: dict[int, str] = {}
        self.limits: tuple[int, ...] = ()
        self.memory = 0
        """Microbatches that each region has memory for; 0: not known."""

    def run(self, steps: int) -> "Loop":
        for _ in range(steps):
            number = len(self.step_s) + 1
            model = self._model_at(number)
            step = simulate(model, num_microbatches=self._count, windows=self.windows)
            self.step_s.append(step.step_s)
            if self.compares:
                wide = [(window,) * len(self.windows) for window in (self._count // 2, self._count)]
                tried = [
                    simulate(model, num_microbatches=self._count, windows=each) for each in wide
                ]
                self.best_s.append(min(each.step_s for each in tried))
            change = self.controller.on_step(
                number,
                self._reporter.figures_of(
                    number, model, step, limits=self.limits, memory=self.memory
                ),
                windows=self.windows,
                num_microbatches=self._count,
                num_samples=128,
            )
            if change is not None:
                assert_worth_it(change.text, self.windows, change.plan.windows)
                self.windows = change.plan.windows
                self.changes[number] = change.text
        return self


def link(one_way_s: float, *, mbit: float = 1000.0) -> Costs:
    costs = equal_stages(2, one_way_s=one_way_s)
    return replace(costs, transfer_s=[2**23 / (mbit * 1e6)])


def assert_worth_it(text: str, before: Sequence[int], now: Sequence[int]) -> None:
    """What a change gives shows in its line as it is printed: a shorter step, or memory."""
    if step := re.search(r"predicted step (\S+) -> (\S+) s", text):
        assert float(step[2]) < float(step[1]), text
    elif fewer := re.search(r"(\d+) fewer in flight", text):
        assert int(fewer[1]) == sum(before) - sum(now) > 0.25 * sum(before), text
    else:
        assert "memory for" in text, text
