"""A measured step against what it must take."""

import pytest

from geotrain.lab.demo.comparison import compare, costs_of
from geotrain.lab.demo.options import Options
from geotrain.lab.demo.state import RunState
from tests.lab.demo.running import MICROBATCHES, RTT_S, running, status_record


def test_costs_are_the_medians_of_the_traces_and_what_the_daemons_measured():
    costs = costs_of(running(3, steps=5, mbit=80.0))
    assert costs.num_microbatches == MICROBATCHES
    assert costs.forward_s == [pytest.approx(0.02)] * 3
    assert costs.backward_s == [pytest.approx(0.04)] * 3
    assert costs.latency_s == [RTT_S / 2] * 2
    # Six MB each way in five steps of four microbatches, at ten MB a second.
    assert costs.transfer_s == [pytest.approx(6e6 / 5 / 4 / 10e6)] * 2


def test_ideal_and_bound_follow_from_the_costs():
    comparison = compare(running(2, steps=5, mbit=80.0), single_process_step_s=0.5)
    assert comparison.step_s == 1.0
    assert comparison.ideal_s == pytest.approx(3 * 0.06 + 2 * 0.06 + 2 * (0.05 + 0.03))
    assert comparison.lower_bound_s == pytest.approx(0.02 + 0.1 + 0.03 + 4 * 0.06)
    assert comparison.single_process_step_s == 0.5
    assert not comparison.link_is_slower
    assert compare(running(2, mbit=8.0), single_process_step_s=None).link_is_slower


def test_one_region_has_no_link_to_pay_for():
    comparison = compare(running(1), single_process_step_s=None)
    assert comparison.ideal_s == pytest.approx(4 * 0.06)
    assert comparison.lower_bound_s == pytest.approx(4 * 0.06)


def test_what_is_not_known_is_not_made_up():
    assert costs_of(running(2, steps=1)) is None  # the first step only warms up
    state = running(2)
    state.regions[1].status = None
    assert costs_of(state) is None
    state = running(2)
    state.on_status(0, status_record(0, options=state.options, rtt_s=None), now=9.0)
    comparison = compare(state, single_process_step_s=None)
    assert (comparison.ideal_s, comparison.lower_bound_s) == (None, None)
    assert not comparison.link_is_slower
    assert costs_of(RunState(Options(), started_at=0.0)) is None
