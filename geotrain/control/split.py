"""Another split of the layers, where one region stays slow: what it would gain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from geotrain.pipeline.simulate import PipelineModel, StageTimes, simulate

GAIN = 0.05
"""What a step must save for a split to be worth a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resplit:
    """The best split found; layers of each region."""

    num_layers: tuple[int, ...]
    now_s: float
    """What a step takes, as simulated, before and after."""
    then_s: float

    def text(self, names: Sequence[str], before: Sequence[int]) -> str:
        """One clause for people."""
        split = ", ".join(
            f"{name} {old} -> {new}" if old != new else f"{name} {old}"
            for name, old, new in zip(names, before, self.num_layers, strict=True)
        )
        return (
            f"with layers {split} a step should take {self.then_s:.3g} s instead of "
            f"{self.now_s:.3g} s: for the next run (this one's checkpoints keep its layers)"
        )


def propose(
    model: PipelineModel,
    num_layers: Sequence[int],
    *,
    num_microbatches: int,
    windows: Sequence[int],
) -> Resplit | None:
    """Move layers between neighbours, one at a time, for as long as the step gains by it.

    A stage's time is taken to be in proportion to its layers. None where nothing gains GAIN, or
    where the layers of a region are not known.
    """
    if len(num_layers) != len(model.stages) or min(num_layers) < 1:
        return None

    def step_s(layers: Sequence[int]) -> float:
        stages = [
            _scaled(stage, new / old)
            for stage, new, old in zip(model.stages, layers, num_layers, strict=True)
        ]
        moved = replace(model, stages=stages)
        return simulate(moved, num_microbatches=num_microbatches, windows=windows).step_s

    best, now_s = tuple(num_layers), step_s(num_layers)
    best_s = now_s
    while True:
        tried = [(step_s(layers), layers) for layers in _neighbours(best)]
        found_s, found = min(tried, default=(best_s, best))
        if found_s >= best_s - 1e-9:
            break
        best, best_s = found, found_s
    if best_s > now_s * (1 - GAIN):
        return None
    return Resplit(num_layers=best, now_s=now_s, then_s=best_s)


def _scaled(stage: StageTimes, factor: float) -> StageTimes:
    return StageTimes(
        forward_s=[each * factor for each in stage.forward_s],
        backward_s=[each * factor for each in stage.backward_s],
    )


def _neighbours(layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every split that one layer's move over one boundary makes of it."""
    found = []
    for index in range(len(layers) - 1):
        for giver, taker in ((index, index + 1), (index + 1, index)):
            if layers[giver] > 1:
                moved = list(layers)
                moved[giver] -= 1
                moved[taker] += 1
                found.append(tuple(moved))
    return found
