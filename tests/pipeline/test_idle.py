"""Why a stage stood still."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.control.ideal import Costs
from geotrain.pipeline.idle import idle_s
from geotrain.pipeline.simulate import Simulated
from tests.pipeline.lines import UNEQUAL, any_costs, equal_stages, hiding, run


def named(step: Simulated, stage: int) -> dict[str, float]:
    """The causes that took more than a millisecond."""
    return {str(cause): round(s, 3) for cause, s in idle_s(step)[stage].items() if s > 1e-3}


@given(any_costs(), st.data())
def test_idle_and_busy_seconds_sum_to_the_step(costs, data):
    windows = tuple(data.draw(st.integers(1, 8)) for _ in costs.forward_s)
    slots = data.draw(st.one_of(st.none(), st.integers(1, 3)))
    step = run(costs, windows, slots=slots)
    for stage, causes in enumerate(idle_s(step)):
        assert min(causes.values()) >= -1e-6
        assert sum(causes.values()) + step.busy_s(stage) == pytest.approx(step.step_s, abs=1e-6)


def test_windows_that_hide_the_links_leave_only_filling_and_draining():
    step = run(equal_stages(2, one_way_s=0.1), hiding(equal_stages(2, one_way_s=0.1)))
    assert named(step, 0).keys() == named(step, 1).keys() == {"fill", "drain"}


def test_a_narrow_window_over_a_long_link_is_latency():
    step = run(equal_stages(2, one_way_s=0.2), (2, 1))
    for stage in range(2):
        causes = named(step, stage)
        assert max(causes, key=causes.__getitem__) == "latency"


def test_a_narrow_window_without_a_link_is_the_window():
    costs = Costs(
        num_microbatches=16,
        forward_s=[0.02] * 2,
        backward_s=[0.04] * 2,
        latency_s=[0.0],
        transfer_s=[0.0],
    )
    assert named(run(costs, (1, 1)), 0).keys() >= {"window"}
    assert "imbalance" not in named(run(costs, (1, 1)), 0)


def test_a_slow_link_is_the_rate():
    costs = Costs(
        num_microbatches=32,
        forward_s=[0.02] * 2,
        backward_s=[0.04] * 2,
        latency_s=[0.05],
        transfer_s=[0.09],
    )
    causes = named(run(costs, (12, 12)), 1)
    assert max(causes, key=causes.__getitem__) == "rate"


def test_want_of_slots_is_the_arena():
    causes = named(run(equal_stages(2, one_way_s=0.1), (6, 1), slots=2), 0)
    assert causes["arena"] > 0.5


def test_a_slow_neighbour_is_imbalance():
    step = run(UNEQUAL, (9, 6, 3))
    assert named(step, 0)["imbalance"] > 0.5
    assert "imbalance" not in named(step, 1), "the slowest stage waits for nobody"
