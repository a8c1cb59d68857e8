"""From what stages and links cost to the windows of the next step."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from geotrain.control.costs import LinkCosts, StageCosts, pipeline_model
from geotrain.pipeline.simulate import PipelineModel, simulate
from geotrain.pipeline.window import classic_windows, windows_for_latency

MARGIN = 0.005
"""Windows are as small as this much of a step allows: each one costs memory."""
_SEEDS = (None, 1, 2)
"""Of the draws that every candidate is tried with; the same for all, so that they compare. None
takes what was measured in its order: where the first tensors of each step are late, it shows."""
_SMALL = 512
"""Stages times microbatches up to which windows are narrowed one by one as well."""
_VARIED = 256
"""And up to which there is more than one draw; both so that planning stays below a second."""
_WIDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""By how many the formula's windows are widened, all of them alike."""
_MOVES = (-4, -2, -1, 1, 2, 4)
"""By how many one window alone is changed, in search of a quicker step."""
_NOTICED = 0.001
"""What such a change must save of a step; else it is rounding."""
_BUSY = 0.9
"""From here on a link queues more than a window can hide."""
_LEAST_S = 1e-6
"""For stages that take no time, which would need windows without end."""

Bound = Literal["nothing", "latency", "rate", "memory", "arena", "overhead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan must keep to."""

    num_microbatches: int
    in_flight: Sequence[int]
    """The most that each region may hold in flight; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the next steps are run."""

    num_microbatches: int
    windows: tuple[int, ...]
    predicted_s: float
    """What a step should take."""


def choose_plan(
    stages: Sequence[StageCosts], links: Sequence[LinkCosts], limits: Limits
) -> tuple[Plan, Bound]:
    """The smallest windows whose step is within MARGIN of the best, and what sets them.

    Windows by the formula come first. They are widened together while the simulation gains by it,
    which it does where stages are unequal or times vary. Wider is not always quicker: a forward
    that may run early can hold up a backward that others wait for. So each window is also changed
    alone while that gains, and in the end all are narrowed one by one while that loses nothing.
    """
    count = limits.num_microbatches
    trial = Trial(pipeline_model(stages, links), count)
    ceiling = [min(count, most) if most else count for most in limits.in_flight]
    formula = formula_windows(stages, links)

    def wider(more: int) -> tuple[int, ...]:
        return tuple(min(w + more, most) for w, most in zip(formula, ceiling, strict=True))

    best = min((wider(more) for more in (0, len(stages), count)), key=trial.step_s)
    if trial.is_small:
        best = _climbed(trial, best, ceiling)
    enough_s = trial.step_s(best) * (1 + MARGIN)
    steps = [more for more in _WIDER if more < count]
    windows = next((wider(more) for more in steps if trial.step_s(wider(more)) <= enough_s), best)
    for index in range(len(windows) if trial.is_small else 0):
        windows = _narrowed(trial, windows, index, enough_s)
    plan = Plan(num_microbatches=count, windows=windows, predicted_s=trial.step_s(windows))
    return plan, _bound(stages, links, limits, plan)


def _climbed(trial: "Trial", windows: tuple[int, ...], ceiling: Sequence[int]) -> tuple[int, ...]:
    """From these windows on, one changed after the other, while a step becomes quicker.

    The last stage's stays: each of its backwards follows its forward, with any window.
    """
    gains = True
    while gains:
        gains = False
        for index in reversed(range(len(windows) - 1)):
            own, most = windows[index], ceiling[index]
            sizes = {min(max(1, own + move), most) for move in _MOVES}
            tried = [(*windows[:index], size, *windows[index + 1 :]) for size in sorted(sizes)]
            quickest = min(tried, key=trial.step_s)
            if trial.step_s(quickest) < trial.step_s(windows) * (1 - _NOTICED):
                windows, gains = quickest, True
    return windows


def _narrowed(
    trial: "Trial", windows: tuple[int, ...], index: int, enough_s: float
) -> tuple[int, ...]:
    """The same with one window as small as the time allows."""

    def with_window(window: int) -> tuple[int, ...]:
        return (*windows[:index], window, *windows[index + 1 :])

    low, high = 1, windows[index]
    while low < high:
        middle = (low + high) // 2
        if trial.step_s(with_window(middle)) <= enough_s:
            high = middle
        else:
            low = middle + 1
    return with_window(high)


def _bound(
    stages: Sequence[StageCosts], links: Sequence[LinkCosts], limits: Limits, plan: Plan
) -> Bound:
    """What keeps a step from being quicker, or made its windows as wide as they are."""
    slowest_s = max(stage.both_s for stage in stages)
    ways = [way for link in links for way in (link.forward, link.backward)]
    if any(way.transfer_s >= _BUSY * slowest_s for way in ways):
        return "rate"
    count = limits.num_microbatches
    free = Trial(pipeline_model(stages, links), count)
    unlimited_s = free.step_s([count] * len(stages))
    if unlimited_s < plan.predicted_s * (1 - 2 * MARGIN):
        return "memory"
    roomy = Trial(pipeline_model(stages, [link.without_slots() for link in links]), count)
    if roomy.step_s([count] * len(stages)) < plan.predicted_s * (1 - 2 * MARGIN):
        return "arena"
    classic = classic_windows(len(stages))
    wide = any(window > least for window, least in zip(plan.windows, classic, strict=True))
    return "latency" if wide else "nothing"


def formula_windows(stages: Sequence[StageCosts], links: Sequence[LinkCosts]) -> tuple[int, ...]:
    """The windows that cover all but the latest deliveries."""
    return windows_for_latency(
        [link.forward.delivery_s for link in links],
        [link.backward.delivery_s for link in links],
        slowest_s=max(_LEAST_S, *(stage.both_s for stage in stages)),
    )


class Trial:
    """Tries windows in simulated steps, each once."""

    def __init__(self, model: PipelineModel, num_microbatches: int) -> None:
        self._model = model
        self._count = num_microbatches
        size = len(model.stages) * num_microbatches
        self.is_small = size <= _SMALL
        self._seeds = _SEEDS if size <= _VARIED and _varies(model) else _SEEDS[:1]
        self._known: dict[tuple[int, ...], float] = {}

    def step_s(self, windows: Sequence[int]) -> float:
        """The mean over a few draws."""
        key = tuple(min(window, self._count) for window in windows)
        if key not in self._known:
            times = [
                simulate(
                    self._model,
                    num_microbatches=self._count,
                    windows=key,
                    rng=Random(seed) if seed is not None else None,
                ).step_s
                for seed in self._seeds
            ]
            self._known[key] = sum(times) / len(times)
        return self._known[key]


def _varies(model: PipelineModel) -> bool:
    times = [each for stage in model.stages for each in (stage.forward_s, stage.backward_s)]
    ways = [way for each in model.boundaries for way in (each.forward, each.backward)]
    return any(len(set(values)) > 1 for values in (*times, *(way.jitter_s for way in ways)))
