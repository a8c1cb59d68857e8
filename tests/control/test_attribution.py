"""Every second of a step, from what the regions tell of it."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.control.attribution import CAUSES, Spans, attribute
from geotrain.control.joints import Joints
from geotrain.control.laid_out import lay_out
from geotrain.control.timings import Ran, Timings
from geotrain.pipeline.idle import idle_s
from geotrain.pipeline.simulate import Simulated, simulate
from tests.control.told_line import ORIGIN_S, timings_of
from tests.pipeline.lines import MIB_S, UNEQUAL, any_costs, equal_stages, hiding, line, run

NAMES = {"latency": "link_delay", "rate": "link_rate"}
"""Where the causes of a simulated step are called otherwise."""


def spans_of(step: Simulated, own: int, **changes: float) -> Spans:
    """What a region would have measured around a step that the simulator ran."""
    runs = step.runs[own]
    spans = Spans(
        user_s=0.0,
        loader_s=0.0,
        open_s=0.0,
        run_s=runs[-1].end_s,
        norms_s=0.0,
        exchange_s=step.step_s - runs[-1].end_s,
        decide_s=0.0,
        commit_s=0.0,
        compute_s=step.busy_s(own),
        coding_s=0.0,
        arena_s=1e9,  # all of what it looks like
    )
    return replace(spans, **changes)


def explained(step: Simulated, own: int, timings: list[Timings], **changes: float):
    joints = Joints(len(timings)).take_in(timings)
    spans = spans_of(step, own, **changes)
    return attribute(lay_out(timings, joints), timings, spans, own=own), spans


@settings(max_examples=60)
@given(any_costs(link_keeps_up=True), st.data())
def test_the_parts_of_any_step_sum_to_its_wall_time(costs, data):
    windows = tuple(data.draw(st.integers(1, 8)) for _ in costs.forward_s)
    step = run(costs, windows)
    timings = timings_of(step, latency_s=costs.latency_s)
    for own in range(len(timings)):
        spent, spans = explained(step, own, timings, user_s=0.5, open_s=0.25, decide_s=0.01)
        assert list(spent) == list(CAUSES)
        assert sum(spent.values()) == pytest.approx(spans.step_s, abs=1e-9)
        assert min(spent.values()) >= -1e-9


@pytest.mark.parametrize(
    ("costs", "windows"),
    [
        (equal_stages(2, one_way_s=0.1), (6, 1)),
        (equal_stages(2, one_way_s=0.2), (2, 1)),
        (equal_stages(4, one_way_s=0.05), (4, 3, 2, 1)),
        (UNEQUAL, (9, 6, 3)),
        (UNEQUAL, (3, 2, 1)),
        (replace(equal_stages(2, one_way_s=0.05), transfer_s=[0.09]), (12, 1)),
    ],
)
def test_clocks_that_differ_by_hours_change_nothing(costs, windows):
    """The same causes as the simulator's own, which sees all by one clock."""
    step = run(costs, windows)
    timings = timings_of(step, latency_s=costs.latency_s)
    expected = idle_s(step)
    for own, told in enumerate(timings):
        # In the simulator every region can begin as the step does.
        opened_s = told.opened_us / 1e6
        rest = {"open_s": opened_s, "run_s": step.runs[own][-1].end_s - opened_s}
        spent, _ = explained(step, own, timings, **rest)
        for cause, seconds in expected[own].items():
            found = spent[NAMES.get(cause, cause)]
            assert found == pytest.approx(seconds, abs=0.004), (own, cause)


def test_a_link_that_cannot_keep_up_is_named():
    costs = replace(equal_stages(2, one_way_s=0.05), transfer_s=[0.12])
    step = run(costs, (16, 1))
    spent, _ = explained(step, 1, timings_of(step, latency_s=costs.latency_s))
    waits = {cause: spent[cause] for cause in ("link_delay", "link_rate", "window", "imbalance")}
    assert max(waits, key=waits.__getitem__) == "link_rate"


def test_a_late_record_makes_no_negative_link():
    costs = equal_stages(2, one_way_s=0.001)
    step = run(costs, (2, 1))
    first, second = timings_of(step, latency_s=costs.latency_s)
    (joint,) = Joints(2).take_in([first, replace(second, heard_us=90_000)])
    assert joint.latency_s >= 0 and joint.s_per_byte == 0.0


@given(st.floats(0.0, 0.3), st.floats(0.0, 0.05), st.integers(0, 3))
@settings(max_examples=30)
def test_clocks_and_link_are_found(one_way_s, jitter_s, seed):
    """With a link that is as long either way, whatever the clocks show."""
    costs = equal_stages(2, one_way_s=one_way_s)
    jitter = [0.0] + [Random(seed).random() * jitter_s for _ in range(7)]
    model = line(costs, jitter_s=jitter)
    step = simulate(model, num_microbatches=32, windows=(32, 1))
    (joint,) = Joints(2).take_in(timings_of(step, latency_s=costs.latency_s))
    assert joint.offset_s == pytest.approx(ORIGIN_S[1] - ORIGIN_S[0], abs=1e-3)
    assert joint.latency_s == pytest.approx(one_way_s, abs=1e-3)
    assert joint.s_per_byte * (1 << 20) == pytest.approx(MIB_S, abs=1e-3)


def test_what_comes_before_the_first_action_is_the_first_regions_doing():
    costs = equal_stages(2, one_way_s=0.1)
    step = run(costs, hiding(costs))
    timings = timings_of(step, latency_s=costs.latency_s)
    timings[0] = replace(timings[0], loader_us=400_000, user_us=100_000, optimizer_us=50_000)
    spent, _ = explained(step, 1, timings, open_s=0.6, user_s=0.01)
    assert spent["loader"] == pytest.approx(0.4)
    assert spent["user_code"] == pytest.approx(0.11)
    assert spent["optimizer"] == pytest.approx(0.05)
    short, _ = explained(step, 1, timings, open_s=0.3)
    assert short["loader"] == pytest.approx(0.3) and short["user_code"] == 0.0


def test_only_a_measured_want_of_slots_is_the_arena():
    """Between an input's arrival and the action lies our own work, too."""
    step = run(equal_stages(2, one_way_s=0.1), (6, 1), slots=2)
    timings = timings_of(step)
    assert explained(step, 0, timings)[0]["arena"] > 0.5
    spent, _ = explained(step, 0, timings, arena_s=0.1)
    assert spent["arena"] == pytest.approx(0.1)
    assert spent["runtime"] > 0.4


def test_a_region_alone_waits_for_nobody():
    step = run(equal_stages(1, one_way_s=0.0), (1,))
    spent, spans = explained(step, 0, timings_of(step), loader_s=0.2, run_s=step.step_s + 0.1)
    assert {cause for cause, seconds in spent.items() if seconds > 1e-6} == {
        *("compute", "loader", "runtime")
    }
    assert sum(spent.values()) == pytest.approx(spans.step_s)


def test_regions_that_train_nothing_have_no_backwards():
    """No gradient comes: the length of the link stays unknown, and nothing breaks."""
    ran = tuple(Ran(m, 1000 * m, 900, 1000 * m, 64) for m in range(4))
    timings = [Timings(forward=ran), Timings(heard_us=50_000, opened_us=50_100, forward=ran)]
    joints = Joints(2).take_in(timings)
    step = lay_out(timings, joints)
    spans = spans_of(run(equal_stages(2, one_way_s=0.0), (1, 1)), 0, run_s=0.004, compute_s=0.0036)
    assert sum(attribute(step, timings, spans, own=0).values()) == pytest.approx(spans.step_s)


def test_a_skipped_step_is_explained_too():
    timings = [Timings(opened_us=10), Timings(heard_us=50, opened_us=60)]
    step = lay_out(timings, Joints(2).take_in(timings))
    empty = run(equal_stages(2, one_way_s=0.0), (1, 1))
    spans = spans_of(empty, 0, run_s=0.0, compute_s=0.0, exchange_s=0.2)
    spent = attribute(step, timings, spans, own=1)
    assert spent["drain"] == pytest.approx(0.2)


def test_the_openings_of_three_steps_count_together():
    """One that was late by itself changes no link."""
    costs = equal_stages(2, one_way_s=0.1)
    step = run(costs, hiding(costs))
    joints = Joints(2)
    found = []
    for number in range(4):
        timings = timings_of(step, at_s=3.0 * number, latency_s=costs.latency_s)
        if number == 2:
            timings[1] = replace(timings[1], heard_us=timings[1].heard_us + 80_000)
        found += joints.take_in(timings)
    assert all(a.latency_s == pytest.approx(b.latency_s, abs=1e-4) for a, b in pairwise(found))
