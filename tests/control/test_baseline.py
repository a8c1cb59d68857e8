"""What is usual, and when a figure has left it."""

from random import Random

import pytest

from geotrain.control.baseline import LEAST_STEPS, Baseline, Watch


def line(work: float) -> float:
    return 0.010 + 2e-6 * work


def seen(steps: int, *, through_zero: bool = True, zero_s: float = 0.0, bad: int = 0) -> Baseline:
    rng = Random(1)
    baseline = Baseline(through_zero=through_zero)
    for step in range(steps):
        works = [rng.uniform(1000, 8000) for _ in range(8)]
        late_s = 0.5 if step < bad else 0.0
        baseline.add([(work, zero_s + line(work) + late_s) for work in works])
    return baseline


def test_overhead_and_slope_are_found():
    assert seen(10).predict(20_000) == pytest.approx(line(20_000))


def test_so_they_are_between_clocks_that_differ_by_months():
    baseline = seen(10, through_zero=False, zero_s=-1e7)
    assert baseline.predict(3000) == pytest.approx(-1e7 + line(3000), abs=1e-7)


def test_a_few_bad_steps_and_microbatches_hardly_move_the_line():
    assert seen(20, bad=3).predict(4000) == pytest.approx(line(4000), rel=0.1)
    baseline = Baseline(through_zero=True)
    for _ in range(10):
        baseline.add([(work, line(work)) for work in (1000, 1001, 4000, 4001, 4002)])
        baseline.add([(1000, line(1000)), (1001, 0.3), (1002, line(1002)), (4000, line(4000))])
    assert baseline.predict(4000) == pytest.approx(line(4000), rel=0.1)


def test_where_all_work_was_the_same_time_is_in_proportion_and_a_delay_constant():
    for through_zero, expected_s in ((True, 0.04), (False, 0.02)):
        baseline = Baseline(through_zero=through_zero)
        for _ in range(LEAST_STEPS):
            baseline.add([(1000.0, 0.02)] * 4)
        assert baseline.predict(2000) == pytest.approx(expected_s)


def test_a_size_is_known_once_it_came_in_some_steps():
    baseline = seen(LEAST_STEPS - 1)
    assert not baseline.knows([(4000, 0.0)])
    baseline = seen(LEAST_STEPS)
    assert baseline.knows([(4000, 0.0)]) and not baseline.knows([(40_000, 0.0)])
    for _ in range(2):
        baseline.add([(40_000, line(40_000))])
    assert not baseline.knows([(40_000, 0.0)])
    baseline.add([(40_000, line(40_000))])
    assert baseline.knows([(40_000, 0.0)])


def off_at(values: list[float], limit: float = 0.25) -> list[int | None]:
    """Since which step it is off, after each of the values."""
    watch = Watch()
    found = []
    for step, value in enumerate(values, start=1):
        watch.take_in(step, value, limit=limit)
        found.append(watch.since)
    return found


def test_three_steps_of_five_are_off_and_the_middle_of_five_is_back():
    assert off_at([0, 0.5, 0, 0.5, 0, 0, 0.5]) == [None] * 7
    assert off_at([0, 0.5, 0.5, 0.5]) == [None, None, None, 2]
    assert off_at([0.5, 0, 0.5, 0.5]) == [None, None, None, 1], "the first slow one of the five"
    assert off_at([0.5] * 5 + [0.0] * 3)[-2:] == [1, None]
    assert off_at([0.5] * 5 + [0.2] * 9)[-1] == 1, "halfway back is not back"


def test_what_is_off_is_not_usual():
    watch = Watch()
    usual = [watch.take_in(step, value, limit=0.25) for step, value in enumerate([0.1, 0.5, 0.0])]
    assert usual == [True, False, True]
    assert watch.noise == 0.0, "too few to say"
    for step in range(20):
        watch.take_in(step, (-0.1, 0.0, 0.1)[step % 3], limit=0.25)
    assert watch.noise == pytest.approx(0.148, abs=0.01)
