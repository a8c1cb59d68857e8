"""What is off is named within ten steps, and nothing is named where all is well."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.control.joints import Joints
from geotrain.control.timings import Timings
from geotrain.control.verdicts import Verdicts
from tests.control.synthetic_run import Run, World

SEEDS = range(8)
NOTICED = 10
"""Steps within which something is named."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spread": 1.0, "quadratic": 0.0},
        {"noise": 0.15},
        {"quadratic": 0.3},
        {"stages": 3, "microbatches": 4, "one_way_s": 0.0005},
    ],
)
def test_500_clean_steps_give_no_verdict(seed, options):
    run = Run(seed, **options)
    run.go(500)
    assert run.lines == [] and run.verdicts == ()


def test_the_plain_rule_would_have_cried_wolf_on_the_same_steps():
    """1.5 x the median of a step's time: it takes long sequences for a slow stage."""
    run = Run(0)
    told = []
    inner = run._timings
    run._timings = lambda *args: told.append(inner(*args)) or told[-1]
    run.go(500)
    times_s = [sum(ran.length_us for ran in each[1].forward) for each in told]
    assert sum(time_s > 1.5 * statistics.median(times_s) for time_s in times_s) > 10


def slow_stage(stage: int, factor: float = 1.5):
    return lambda world: world.slow.update({stage: factor})


def late(*links: tuple[int, int]):
    return lambda world: world.more_s.update(dict.fromkeys(links, 0.2))


INJECTED = {
    "a slowed stage": ({}, slow_stage(1), {("compute", "frankfurt")}),
    "the first one": ({"stages": 3}, slow_stage(0), {("compute", "virginia")}),
    "among noise": ({"noise": 0.15}, slow_stage(1), {("compute", "frankfurt")}),
    "two stages": ({}, lambda w: w.slow.update({0: 1.5, 1: 2.0}), {
        ("compute", "virginia"), ("compute", "frankfurt"),
    }),
    "copies": ({}, lambda w: w.coding_s.update({1: 0.03}), {("coding", "frankfurt")}),
    "a link": ({}, late((0, 1)), {("link", "virginia -> frankfurt")}),
    "the way back": ({}, late((1, 0)), {("link", "frankfurt -> virginia")}),
    "both ways": ({}, late((0, 1), (1, 0)), {
        ("link", "virginia -> frankfurt"), ("link", "frankfurt -> virginia"),
    }),
    "one of two links": ({"stages": 3}, late((2, 1)), {("link", "tokyo -> frankfurt")}),
    "a rate": (
        {}, lambda w: w.slow_link.update({(0, 1): 8.0}), {("link", "virginia -> frankfurt")},
    ),
    "a receiver": ({"stages": 3}, late((0, 1), (2, 1)), {("receiver", "frankfurt")}),
    "a sender": ({"stages": 3}, late((1, 0), (1, 2)), {("sender", "frankfurt")}),
    "all links of one": (
        {"stages": 3}, late((0, 1), (2, 1), (1, 0), (1, 2)), {("region links", "frankfurt")},
    ),
    "the loader": ({}, lambda w: setattr(w, "loader_s", 0.5), {("loader", "virginia")}),
    "a stopped process": ({}, lambda w: w.stopped.update({1: 5.0}), {("stopped", "frankfurt")}),
    "a stop in a wait": ({}, lambda w: w.frozen_s.update({0: 5.0}), {("stopped", "virginia")}),
}  # fmt: skip


@pytest.mark.parametrize("what", INJECTED)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_off_is_named_rightly_and_alone_until_it_is_over(seed, what):
    options, change, wanted = INJECTED[what]
    run = Run(seed, **options)
    run.go(30)
    assert run.lines == []
    change(run.world)
    run.go(NOTICED, until=lambda run: run.kinds() == wanted)
    assert run.kinds() == wanted
    named = len(run.lines)
    run.go(20)
    assert run.kinds() == wanted, "and stays named"
    assert [
        line for line in run.lines[named:] if "layers" not in line and "stood" not in line
    ] == []
    run.world.__init__()
    run.go(NOTICED, until=lambda run: not run.verdicts)
    assert run.kinds() == set()
    is_stop = any(kind == "stopped" for kind, _ in wanted)
    assert sum(": over: " in line for line in run.lines) == (0 if is_stop else len(wanted))


def test_user_code_of_any_region_is_named():
    run = Run(1)
    run.go(30)
    run.world.user_s = 0.6
    run.go(NOTICED)
    assert ("user_code", "virginia") in run.kinds()


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(1.45, 4.0),
    st.integers(0, 2),
    st.integers(2, 32),
    st.floats(1.0, 8.0),
)
def test_any_slow_stage_is_named_and_no_other(seed, factor, stage, microbatches, spread):
    run = Run(seed, stages=3, microbatches=microbatches, spread=spread)
    run.go(25)
    run.world.slow[stage] = factor
    run.go(NOTICED)
    assert run.kinds() == {("compute", run.names[stage])}


def test_the_lines_read_well():
    run = Run(3)
    run.go(30)
    run.world.slow[1] = 1.5
    run.go(14)
    run.world = World()
    run.go(10)
    begins, remedy, over = run.lines
    assert begins == "step 33: compute in frankfurt 1.5x its own since step 31"
    assert remedy.startswith(
        "step 41: compute in frankfurt 1.5x its own since step 31; with layers virginia 4 -> 5, "
        "frankfurt 4 -> 3 a step should take "
    )
    assert over.startswith("step 47: over: compute in frankfurt 1.")
    run.world.more_s[0, 1] = 0.2
    run.go(5)
    assert run.lines[-1].startswith("step 57: link virginia -> frankfurt 3.")
    assert run.lines[-1].endswith("x its median since step 55")


def test_a_new_number_of_microbatches_is_no_slow_stage():
    """Their size is another: what was seen before says nothing of it."""
    run = Run(4, spread=1.0, quadratic=0.0)
    for scale in (1, 4, 2, 1):
        run.scale, run.count = scale, 16 // scale
        run.go(20)
    assert run.lines == []


def test_skipped_steps_say_nothing():
    verdicts = Verdicts(["a", "b"], layers=[1, 1])
    empty = [Timings(), Timings()]
    assert verdicts.on_step(1, empty, Joints(2).take_in(empty), {}) == []


def test_a_region_alone_has_verdicts_too():
    run = Run(5, stages=1)
    run.go(30)
    run.world.slow[0] = 1.6
    run.go(NOTICED)
    assert run.kinds() == {("compute", "virginia")}


def test_where_nothing_is_gained_no_split_is_proposed():
    """One layer each: none can move."""
    run = Run(6, layers=[1, 1])
    run.go(30)
    run.world.slow[1] = 1.5
    run.go(20)
    assert len(run.lines) == 1 and run.verdicts[0].remedy == ""
