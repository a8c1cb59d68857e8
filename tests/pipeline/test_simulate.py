"""Steps in simulated time: against the formulas, and against what can never be."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.control.ideal import Costs, ideal_step_s, lower_bound_s
from geotrain.pipeline.schedule import parse_row, print_row
from geotrain.pipeline.simulate import (
    PipelineModel,
    Simulated,
    StageTimes,
    simulate,
)
from geotrain.pipeline.timed import Trace
from geotrain.pipeline.validate import validate_trace
from geotrain.pipeline.window import classic_windows
from tests.pipeline.lines import MIB_S, UNEQUAL, any_costs, equal_stages, hiding, line, run

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.mark.parametrize("one_way_s", [0.0, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_equal_stages_with_windows_that_hide_the_links_take_the_ideal_time(num_stages, one_way_s):
    costs = equal_stages(num_stages, one_way_s=one_way_s)
    assert run(costs, hiding(costs)).step_s == pytest.approx(ideal_step_s(costs), abs=1e-6)


@given(any_costs(equal=True, link_keeps_up=True))
def test_whatever_the_times_of_equal_stages(costs):
    assert run(costs, hiding(costs)).step_s == pytest.approx(ideal_step_s(costs), rel=1e-6)


@pytest.mark.parametrize(
    ("windows", "step_s"), [((7, 4, 1), 2.21), ((8, 5, 2), 2.15), ((9, 6, 3), 2.13)]
)
def test_unequal_stages_as_worked_out_in_the_documents(windows, step_s):
    assert run(UNEQUAL, windows).step_s == pytest.approx(step_s, abs=0.005)


@pytest.mark.parametrize(("busiest_link", "most"), [(0.9, 1 + 1e-9), (1.0, 1.03)])
def test_300_random_lines_are_never_above_the_ideal(busiest_link, most):
    """But for a little where a link is busy all the time: then what queued once stays queued."""
    rng = Random(5)
    for _ in range(300):
        num_stages = rng.randint(2, 4)
        forward_s = [rng.uniform(0.005, 0.05) for _ in range(num_stages)]
        backward_s = [rng.uniform(0.01, 0.1) for _ in range(num_stages)]
        slowest_s = max(f + b for f, b in zip(forward_s, backward_s, strict=True))
        links = range(num_stages - 1)
        costs = Costs(
            num_microbatches=32,
            forward_s=forward_s,
            backward_s=backward_s,
            latency_s=[rng.uniform(0.0, 0.2) for _ in links],
            transfer_s=[rng.uniform(0.0, busiest_link * slowest_s) for _ in links],
        )
        assert run(costs, hiding(costs)).step_s <= ideal_step_s(costs) * most


def test_the_classic_window_waits_a_round_trip_for_every_other_microbatch():
    costs = equal_stages(2, one_way_s=0.1)
    assert run(costs, classic_windows(2)).step_s > 2.4 * ideal_step_s(costs)


@given(any_costs(), st.data())
def test_a_step_is_legal_within_its_windows_and_never_below_the_bound(costs, data):
    num_stages = len(costs.forward_s)
    windows = tuple(data.draw(st.integers(1, 12)) for _ in range(num_stages))
    slots = data.draw(st.one_of(st.none(), st.integers(1, 4)))
    step = run(costs, windows, slots=slots)
    assert step.step_s >= lower_bound_s(costs) - 1e-9
    assert all(peak <= window for peak, window in zip(step.peak_in_flight, windows, strict=True))
    validate_trace(step.trace, num_microbatches=costs.num_microbatches, windows=windows)
    if slots is not None:
        assert most_unreleased(step, costs) <= slots


def most_unreleased(step: Simulated, costs: Costs) -> int:
    """The most activations of boundary 0 that the sender did not know to be taken, at any time."""
    if len(step.runs) == 1:
        return 0
    events = [(each.sent_s, 1) for each in step.forward[0]]
    taken_s = [run.begin_s for run in step.runs[1] if run.kind == "F"]
    events += [(begin_s + costs.latency_s[0], -1) for begin_s in taken_s]
    most = count = 0
    # A slot that is free again may be used in the same instant.
    for _, change in sorted(events, key=lambda event: (round(event[0], 9), event[1])):
        count += change
        most = max(most, count)
    return most


@given(any_costs(), st.integers(0, 2**32), st.booleans(), st.data())
@settings(max_examples=50)
def test_distributions_and_jitter_break_none_of_it(costs, seed, ahead, data):
    spread = [0.5, 1.0, 1.5]
    model = PipelineModel(
        stages=[
            StageTimes(
                forward_s=[f * factor for factor in spread],
                backward_s=[b * factor for factor in spread],
            )
            for f, b in zip(costs.forward_s, costs.backward_s, strict=True)
        ],
        boundaries=line(costs, jitter_s=[0.0, 0.02, 0.1]).boundaries,
        decides_ahead=ahead,
    )
    windows = tuple(data.draw(st.integers(1, 8)) for _ in costs.forward_s)
    count = costs.num_microbatches
    step = simulate(model, num_microbatches=count, windows=windows, rng=Random(seed))
    again = simulate(model, num_microbatches=count, windows=windows, rng=Random(seed))
    assert step.runs == again.runs
    validate_trace(step.trace, num_microbatches=count, windows=windows)
    assert all(len(runs) == 2 * count for runs in step.runs)
    for deliveries in (*step.forward, *step.backward):
        arrivals = [each.arrived_s for each in deliveries]
        assert arrivals == sorted(arrivals), "tensors overtake each other"


def test_values_are_taken_in_turn_without_a_generator():
    model = PipelineModel(
        stages=[StageTimes(forward_s=[1.0, 2.0], backward_s=[3.0])], boundaries=[]
    )
    step = simulate(model, num_microbatches=3, windows=[1])
    assert [r.end_s - r.begin_s for r in step.runs[0]] == [1.0, 3.0, 2.0, 3.0, 1.0, 3.0]


def test_a_link_slower_than_the_stages_sets_the_pace():
    costs = Costs(
        num_microbatches=32,
        forward_s=[0.02] * 2,
        backward_s=[0.04] * 2,
        latency_s=[0.05],
        transfer_s=[0.09],
    )
    # One tensor each way every 90 ms: the last activation leaves after 32 of them.
    link_s = 0.02 + 32 * 0.09 + 0.05 + 0.06 + 0.09 + 0.05 + 0.04
    assert run(costs, (32, 32)).step_s == pytest.approx(link_s, rel=0.01)


def test_other_traffic_takes_its_share_of_the_rate():
    costs = equal_stages(2, one_way_s=0.05)
    slow = run(costs, (9, 1), other_load=0.5)
    twice = Costs(
        num_microbatches=32,
        forward_s=costs.forward_s,
        backward_s=costs.backward_s,
        latency_s=costs.latency_s,
        transfer_s=[2 * MIB_S],
    )
    assert slow.runs == run(twice, (9, 1)).runs


def test_too_few_slots_cost_what_a_narrow_window_does():
    costs = equal_stages(2, one_way_s=0.1)
    assert run(costs, (6, 1), slots=8).step_s == pytest.approx(ideal_step_s(costs))
    assert run(costs, (6, 1), slots=1).step_s > 1.5 * ideal_step_s(costs)


def test_choosing_ahead_costs_a_little_where_the_gradient_comes_just_too_late():
    costs = equal_stages(2, one_way_s=0.05, num_microbatches=8)
    windows = hiding(costs)
    model = line(costs)
    ahead = PipelineModel(stages=model.stages, boundaries=model.boundaries, decides_ahead=True)
    late = simulate(ahead, num_microbatches=8, windows=windows)
    assert ideal_step_s(costs) <= late.step_s < 1.1 * ideal_step_s(costs)
    assert print_row(late.trace.computing().rows()[1]).startswith("1F0 1B0 1F1 1B1")


def test_the_last_stage_alternates_and_the_first_runs_ahead():
    rows = run(equal_stages(2, one_way_s=0.05, num_microbatches=5), (4, 1)).trace.computing().rows()
    assert print_row(rows[0]) == "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4"
    assert rows[1] == parse_row("1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4")


@pytest.mark.parametrize(
    ("name", "costs", "windows"),
    [
        ("2_stages_classic", equal_stages(2, one_way_s=0.05, num_microbatches=4), (2, 1)),
        ("2_stages_hiding", equal_stages(2, one_way_s=0.05, num_microbatches=6), (4, 1)),
        ("3_stages_unequal", UNEQUAL, (7, 4, 1)),
    ],
)
def test_whole_traces_stay_as_they_were(name, costs, windows):
    assert str(run(costs, windows).trace) == (GOLDEN / f"{name}.trace").read_text()
    golden = Trace.parse((GOLDEN / f"{name}.trace").read_text())
    validate_trace(golden, num_microbatches=costs.num_microbatches, windows=windows)


def test_a_thousand_steps_of_four_stages():
    """Fast enough for a planner that tries many windows: these take a second or two."""
    rng = Random(1)
    costs = equal_stages(4, one_way_s=0.05)
    model = line(costs, jitter_s=[0.0, 0.005, 0.01, 0.03])
    widest = hiding(costs)
    for _ in range(1000):
        windows = [rng.randint(1, most) for most in widest]
        step = simulate(model, num_microbatches=32, windows=windows, rng=rng)
        assert step.step_s >= lower_bound_s(costs)
