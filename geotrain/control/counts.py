"""How many microbatches: more of them fill the line better and fit a small memory, fewer of them
pay less overhead. What a stage takes at another size follows from the sizes that it has run."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from geotrain.control.costs import DirectionCosts, LinkCosts, StageCosts, fit_line, mean
from geotrain.control.observed import Seen
from geotrain.control.planner import Bound, Limits, Plan, choose_plan

GAIN = 0.03
"""What another count must save of a step."""
_MAX_SIZES = 4
"""Of the sizes seen last, through which a line is drawn."""
_MAX_STEPS = 5
"""Of the steps at each size, over which its times are averaged."""
_Means = tuple[tuple[float, float], ...]
"""Of each stage: a forward and a backward."""


class Sizes:
    """What every stage took for a microbatch, at every size that has run."""

    def __init__(self) -> None:
        self._steps: dict[float, deque[_Means]] = {}

    def add(self, size: float, stages: Sequence[StageCosts]) -> None:
        """Note the times of a step at a size, which is samples in a microbatch."""
        steps = self._steps.pop(size, None) or deque(maxlen=_MAX_STEPS)
        steps.append(tuple((mean(each.forward_s), mean(each.backward_s)) for each in stages))
        self._steps[size] = steps
        while len(self._steps) > _MAX_SIZES:
            self._steps.pop(next(iter(self._steps)))

    def _points(self, stage: int, part: int) -> list[tuple[float, float]]:
        """(samples, seconds) of a stage's forwards (0) or backwards (1)."""
        return [
            (size, mean([means[stage][part] for means in steps]))
            for size, steps in self._steps.items()
        ]

    def at(self, other: float, seen: Seen, *, size: float) -> Seen:
        """What was seen at `size`, as it should be with microbatches of another size."""
        stages = [
            StageCosts(
                forward_s=_scaled(stage.forward_s, self._points(index, 0), size, other),
                backward_s=_scaled(stage.backward_s, self._points(index, 1), size, other),
            )
            for index, stage in enumerate(seen.stages)
        ]
        links = [
            LinkCosts(
                forward=_resized(link.forward, other / size),
                backward=_resized(link.backward, other / size),
            )
            for link in seen.links
        ]
        return Seen(stages=tuple(stages), links=tuple(links))


def _scaled(
    times_s: Sequence[float], points: Sequence[tuple[float, float]], size: float, other: float
) -> tuple[float, ...]:
    """Measured times, spread included, moved along the line through the points."""
    fit = fit_line(points)
    factor = fit.at(other) / fit.at(size) if fit.at(size) > 0 else other / size
    return tuple(time_s * factor for time_s in times_s)


def _resized(way: DirectionCosts, factor: float) -> DirectionCosts:
    slots = None if way.slots is None else max(1, int(way.slots / factor))
    return replace(way, transfer_s=way.transfer_s * factor, slots=slots)


def choose_count(
    seen: Seen,
    sizes: Sizes,
    *,
    num_samples: int,
    num_microbatches: int,
    in_flight: Sequence[int],
    memory: Sequence[int],
    may_double: bool = True,
    may_halve: bool = True,
) -> tuple[Plan, Bound]:
    """The plan for as many microbatches as now, for twice or for half as many.

    Another count must gain GAIN, and one of its microbatches must fit every region's memory; it is
    never more than there are samples, nor fewer than there are stages where there were more.

    Args:
        seen: At `num_microbatches`.
        in_flight: The most microbatches that each region's config allows in flight; 0: no limit.
        memory: The most that each region has memory for, at the present size; 0: not known.
    """
    size = num_samples / num_microbatches

    def plan_for(count: int) -> tuple[Plan, Bound]:
        other = num_samples / count
        expected = sizes.at(other, seen, size=size) if count != num_microbatches else seen
        room = [int(most * size / other) if most else 0 for most in memory]
        limits = Limits(
            num_microbatches=count,
            in_flight=[
                min([most for most in pair if most], default=0)
                for pair in zip(in_flight, room, strict=True)
            ],
        )
        return choose_plan(expected.stages, expected.links, limits)

    best, bound = plan_for(num_microbatches)
    enough_s = best.predicted_s * (1 - GAIN)
    fewest = min(num_microbatches, len(seen.stages))
    others = [2 * num_microbatches] if may_double else []
    others += [num_microbatches // 2] if may_halve else []
    for count in others:
        # In proportion, and 0 stands for no limit: what has no room for one is no candidate.
        has_room = all(most * count >= num_microbatches for most in memory if most)
        if not fewest <= count <= num_samples or not has_room:
            continue
        plan, _ = plan_for(count)
        if plan.predicted_s < min(enough_s, best.predicted_s):
            # Why it is another count: what held the present one back, or what each one costs.
            best, bound = plan, bound if count > num_microbatches else "overhead"
    return best, bound
