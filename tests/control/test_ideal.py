"""What a step must take: the figures of the documents, and how they depend on what goes in."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.control.ideal import Costs, ideal_step_s, lower_bound_s

TIMES = st.floats(0.0, 10.0)


@st.composite
def costs(draw: st.DrawFn, *, equal: bool = False) -> Costs:
    num_stages = draw(st.integers(1, 6))

    def times(count: int) -> list[float]:
        if equal:
            return [draw(TIMES)] * count
        return [draw(TIMES) for _ in range(count)]

    return Costs(
        num_microbatches=draw(st.integers(1, 64)),
        forward_s=times(num_stages),
        backward_s=times(num_stages),
        latency_s=times(num_stages - 1),
        transfer_s=times(num_stages - 1),
    )


def two_stages(*, rtt_s: float) -> Costs:
    return Costs(
        num_microbatches=32,
        forward_s=[0.02, 0.02],
        backward_s=[0.04, 0.04],
        latency_s=[rtt_s / 2],
        transfer_s=[2**20 / 125e6],
    )


UNEQUAL = Costs(
    num_microbatches=32,
    forward_s=[0.010, 0.020, 0.015],
    backward_s=[0.020, 0.040, 0.030],
    latency_s=[0.05, 0.05],
    transfer_s=[0.0084, 0.0084],
)


@pytest.mark.parametrize(("rtt_s", "ideal_s"), [(0.0, 1.997), (0.1, 2.097), (0.2, 2.197)])
def test_each_link_is_paid_for_once_a_step(rtt_s, ideal_s):
    assert ideal_step_s(two_stages(rtt_s=rtt_s)) == pytest.approx(ideal_s, abs=0.001)


def test_a_line_of_unequal_stages():
    assert ideal_step_s(UNEQUAL) == pytest.approx(2.229, abs=0.001)
    assert lower_bound_s(UNEQUAL) == pytest.approx(2.038, abs=0.001)


def test_the_bound_of_two_equal_stages_is_below_by_one_backward_and_one_transfer():
    costs = two_stages(rtt_s=0.1)
    difference_s = ideal_step_s(costs) - lower_bound_s(costs)
    assert difference_s == pytest.approx(costs.backward_s[0] + costs.transfer_s[0])


def test_one_stage_has_nothing_to_wait_for():
    alone = Costs(
        num_microbatches=4, forward_s=[1.0], backward_s=[2.0], latency_s=[], transfer_s=[]
    )
    assert ideal_step_s(alone) == lower_bound_s(alone) == 12.0


@given(costs(equal=True))
def test_the_ideal_of_equal_stages_is_above_the_bound(costs):
    assert ideal_step_s(costs) >= lower_bound_s(costs) - 1e-9


@given(costs())
def test_so_is_that_of_unequal_ones(costs):
    assert ideal_step_s(costs) >= lower_bound_s(costs) - 1e-9


@given(costs(), st.floats(0.0, 5.0), st.data())
def test_both_grow_with_every_argument(costs, more, data):
    name = data.draw(st.sampled_from(["forward_s", "backward_s", "latency_s", "transfer_s"]))
    values = list(getattr(costs, name))
    if values:
        values[data.draw(st.integers(0, len(values) - 1))] += more
    slower = replace(costs, **{name: values})
    longer = replace(costs, num_microbatches=costs.num_microbatches + 1)
    for other in (slower, longer):
        assert ideal_step_s(other) >= ideal_step_s(costs) - 1e-9
        assert lower_bound_s(other) >= lower_bound_s(costs) - 1e-9
