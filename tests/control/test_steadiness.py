"""What does not call for other windows changes none, and what does is followed all the same."""

import itertools
from collections.abc import Collection
from dataclasses import replace
from random import Random

import pytest

from geotrain.control.ideal import Costs, ideal_step_s
from geotrain.pipeline.simulate import Boundary, PipelineModel, StageTimes
from tests.control.loop import Loop, link
from tests.pipeline.lines import equal_stages, line, noisy


@pytest.mark.parametrize(("num_stages", "seed"), [(2, 0), (3, 1)])
def test_noise_changes_nothing(num_stages, seed):
    """1000 steps with 20 % jitter of every time: the first plan, and one more at most."""
    costs = equal_stages(num_stages, one_way_s=0.05)
    rng = Random(seed)
    loop = Loop(lambda _: noisy(costs, rng, jitter_s=0.02)).run(1000)
    assert len(loop.changes) <= 2, loop.changes
    assert sum(loop.step_s[5:]) / 995 <= ideal_step_s(costs) * 1.06


def test_the_latest_of_sixteen_tensors_varies_and_changes_nothing():
    """Jitter of the size of a microbatch: the delivery's time of a step is its latest tensor's."""
    rng = Random(3)
    costs = replace(
        equal_stages(2, one_way_s=0.05, num_microbatches=16),
        forward_s=[0.011] * 2,
        backward_s=[0.022] * 2,
    )

    def model_at(_: int) -> PipelineModel:
        (boundary,) = noisy(costs, rng, jitter_s=0.0).boundaries
        late = [[abs(rng.gauss(0.0, 0.02)) for _ in range(16)] for _ in range(2)]
        there, back = (replace(boundary.forward, jitter_s=each) for each in late)
        return replace(line(costs), boundaries=[Boundary(forward=there, backward=back)])

    loop = Loop(model_at, count=16).run(1000)
    assert len(loop.changes) <= 2, loop.changes


def test_one_slower_step_is_no_change_of_the_link():
    loop = Loop(lambda step: line(link(0.07 if step == 10 else 0.05))).run(20)
    assert list(loop.changes) == [1]


def test_one_step_in_which_nothing_was_quick_is_not_followed():
    loop = Loop(lambda step: line(link(0.3 if step == 10 else 0.05))).run(20)
    assert list(loop.changes) == [1]


def test_one_step_in_which_many_were_late_is_not_followed():
    """As with a burst of losses: what came through at once says that the link is as it was."""

    def model_at(step: int) -> PipelineModel:
        late = [0.0, 0.0, 0.4, 0.4] if step == 10 else [0.0]
        return line(link(0.05), jitter_s=late)

    assert list(Loop(model_at).run(20).changes) == [1]


def test_moves_in_opposite_directions_confirm_nothing():
    one_way_s = {11: 0.33, 12: 0.17, 13: 0.33, 14: 0.17}
    loop = Loop(lambda step: line(link(one_way_s.get(step, 0.25))))
    loop.run(20)
    assert list(loop.changes) == [1]


SMALL = replace(
    equal_stages(2, one_way_s=0.05, num_microbatches=16),
    forward_s=[0.01] * 2,
    backward_s=[0.02] * 2,
)
CALM = [at for first in (60, 120) for at in range(first - 1, first + 4)]
"""Around the steps in which links change."""


class Weather:
    """Tensors that are up to 20 ms late and some more, and now and then a burst of lateness.

    A burst lasts for a part of one step or for all of it, in one direction or in both, and is
    heavy-tailed: mostly some tenths of a second, at times three. There is none in the steps that
    are `calm`: beside a link that changes nothing tells a burst from the change.
    """

    def __init__(self, rng: Random, *, calm: Collection[int] = ()) -> None:
        self._rng, self._calm = rng, calm
        self._next_burst = rng.randrange(4, 20)

    def at(self, step: int, costs: Costs, *, moved: tuple[int, int, float] = (0, 0, 0.0)):
        """The line in a step.

        Args:
            moved: From which microbatch to which tensors take so many seconds more.
        """
        rng, count = self._rng, costs.num_microbatches
        late = [[abs(rng.gauss(0.0, 0.01)) for _ in range(count)] for _ in range(2)]
        for way in late:
            for index in range(*moved[:2]):
                way[index] += moved[2]
        has_burst = step == self._next_burst
        if has_burst:
            self._next_burst += rng.randrange(3, 20)
        if has_burst and step not in self._calm:
            size_s = min(3.0, 0.1 * rng.paretovariate(1.1))
            first = rng.choice([0, rng.randrange(count)])
            for way in rng.choice([late, late[:1], late[1:]]):
                for index in range(first, rng.randrange(first, count) + 1 if first else count):
                    way[index] += size_s

        def varied(time_s: float) -> list[float]:
            return [time_s * rng.lognormvariate(0.0, 0.03) for _ in range(count)]

        (boundary,) = line(costs).boundaries
        there, back = (replace(boundary.forward, jitter_s=way) for way in late)
        stages = [
            StageTimes(forward_s=varied(f), backward_s=varied(b))
            for f, b in zip(costs.forward_s, costs.backward_s, strict=True)
        ]
        return PipelineModel(stages=stages, boundaries=[Boundary(forward=there, backward=back)])


@pytest.mark.parametrize("seed", range(16))
def test_bursts_of_one_step_and_jitter_change_nothing(seed):
    """200 steps at a round trip of 20 or 100 ms: the first plan, and one more at most."""
    weather = Weather(Random(seed))
    costs = replace(SMALL, latency_s=[0.01 if seed % 2 else 0.05])
    loop = Loop(lambda step: weather.at(step, costs), count=16)
    loop.windows = (16, 1)
    loop.run(200)
    assert len(loop.changes) <= 2, loop.changes


@pytest.mark.parametrize("seed", range(12))
def test_a_round_trip_that_changes_in_such_weather_is_followed_within_three_steps(seed):
    """20, 300, 20 ms, at any microbatch of a step; and nothing else changes the windows."""
    rng = Random(seed)
    weather = Weather(rng, calm=CALM)
    borders = [rng.randrange(1, 16) for _ in range(2)]
    short, more_s = replace(SMALL, latency_s=[0.01]), 0.28

    def model_at(step: int) -> PipelineModel:
        if step == 60:
            return weather.at(step, short, moved=(borders[0], 16, more_s))
        if step == 120:
            return weather.at(step, short, moved=(0, borders[1], more_s))
        return weather.at(step, replace(SMALL, latency_s=[0.15]) if 60 < step < 120 else short)

    loop = Loop(model_at, count=16)
    loop.windows = (16, 1)
    loop.run(160)
    followed = [at for at in loop.changes if at in range(60, 63) or at in range(120, 123)]
    assert followed and followed[0] < 63 and followed[-1] >= 120, loop.changes
    assert len(loop.changes) - len(followed) <= 2, loop.changes
    wide = [at for at in loop.changes if at < 120][-1]
    assert "-> 1" in loop.changes[wide], "12 or so are needed at 300 ms"
    assert loop.windows[0] <= 6


@pytest.mark.parametrize("seed", range(6))
def test_a_rate_that_changes_in_such_weather_is_followed_within_three_steps(seed):
    """1000, 200, 1000 Mbit/s: from the fourth step on each is about as quick as with any window."""
    weather = Weather(Random(seed), calm=CALM)
    slow = replace(SMALL, transfer_s=[5 * SMALL.transfer_s[0]])
    loop = Loop(lambda step: weather.at(step, slow if 60 <= step < 120 else SMALL), count=16)
    loop.windows, loop.compares = (16, 1), True
    loop.run(160)
    late = [
        at
        for first in (60, 120)
        for at in range(first + 3, first + 40)
        if loop.step_s[at - 1] > 1.1 * loop.best_s[at - 1]
    ]
    # A burst is not followed: the steps that have one may be slower than with wide windows.
    assert len(late) <= 8, (late, loop.changes)
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(late)), late
    assert len(loop.changes) <= 4, loop.changes


def test_windows_that_memory_has_no_room_for_go_at_once():
    """Whatever they give, and although the link may not be known well yet."""
    for mbit in (35, 1000):
        loop = Loop(lambda _, mbit=mbit: line(link(0.05, mbit=mbit)))
        loop.windows, loop.memory = (32, 1), 4
        loop.run(1)
        assert max(loop.windows) <= 4
        loop.run(20)
        loop.memory = 3
        loop.run(1)
        assert max(loop.windows) <= 3
        assert loop.run(20).windows[0] == 3
