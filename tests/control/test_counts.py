"""How many microbatches: what is predicted for other sizes, and a loop that follows a link."""

import itertools
from dataclasses import replace
from random import Random

import pytest

from geotrain.control.controller import Controller
from geotrain.control.costs import DirectionCosts, LinkCosts, StageCosts
from geotrain.control.counts import Sizes, choose_count
from geotrain.control.ideal import Costs
from geotrain.control.observed import Seen
from geotrain.pipeline.simulate import PipelineModel, simulate
from geotrain.pipeline.window import classic_windows
from tests.control.measured_line import Reporter, figures_of
from tests.pipeline.lines import equal_stages, line, noisy

NUM_SAMPLES = 128
ROOM = 16
"""Samples that each region's memory holds in flight."""


def costs_at(count: int, *, rtt_s: float) -> Costs:
    """13 ms a sample and 8 ms a microbatch in each of two stages, a third of it forward."""
    both_s = 0.008 + 0.013 * NUM_SAMPLES / count
    costs = equal_stages(2, one_way_s=rtt_s / 2, num_microbatches=count)
    costs = replace(costs, forward_s=[both_s / 3] * 2, backward_s=[2 * both_s / 3] * 2)
    transfer_s = [2**20 / 125e6 * 32 / count]
    return replace(costs, transfer_s=transfer_s)


def model_at(count: int, *, rtt_s: float, slots: int | None = None) -> PipelineModel:
    return line(costs_at(count, rtt_s=rtt_s), slots=slots)


def seen_at(count: int, *, rtt_s: float) -> Seen:
    model = model_at(count, rtt_s=rtt_s)
    ways = [
        DirectionCosts(latency_s=each.forward.latency_s, transfer_s=each.forward.transfer_s)
        for each in model.boundaries
    ]
    return Seen(
        stages=tuple(
            StageCosts(forward_s=tuple(s.forward_s), backward_s=tuple(s.backward_s))
            for s in model.stages
        ),
        links=tuple(LinkCosts(forward=way, backward=way) for way in ways),
    )


def sizes_of(*counts: int) -> Sizes:
    sizes = Sizes()
    for count in counts:
        sizes.add(NUM_SAMPLES / count, seen_at(count, rtt_s=0.1).stages)
    return sizes


def choose(count: int, sizes: Sizes, *, rtt_s: float, room: int = 0, **may: bool):
    return choose_count(
        seen_at(count, rtt_s=rtt_s),
        sizes,
        num_samples=NUM_SAMPLES,
        num_microbatches=count,
        in_flight=(0, 0),
        memory=(room * count // NUM_SAMPLES,) * 2,
        **may,
    )


def test_another_size_is_predicted_from_two_that_were_seen():
    expected = sizes_of(16, 32).at(2.0, seen_at(32, rtt_s=0.1), size=4.0)
    truth = seen_at(64, rtt_s=0.1)
    for found, true in zip(expected.stages, truth.stages, strict=True):
        assert found.both_s == pytest.approx(true.both_s)
    assert expected.links[0].forward.transfer_s == pytest.approx(truth.links[0].forward.transfer_s)


def test_slots_hold_more_of_smaller_tensors():
    seen = seen_at(32, rtt_s=0.1)
    way = replace(seen.links[0].forward, slots=5)
    seen = replace(seen, links=(LinkCosts(forward=way, backward=way),))
    assert sizes_of(32).at(2.0, seen, size=4.0).links[0].forward.slots == 10
    assert sizes_of(32).at(64.0, seen, size=4.0).links[0].forward.slots == 1


def test_where_memory_bounds_the_window_smaller_microbatches_fit_more():
    plan, bound = choose(32, sizes_of(32, 64), rtt_s=0.2, room=ROOM)
    assert (plan.num_microbatches, bound) == (64, "memory")
    fixed, _ = choose(64, sizes_of(32, 64), rtt_s=0.2, room=ROOM)
    assert fixed.num_microbatches == 64, "and there it stays"


def test_with_memory_in_plenty_overhead_sets_the_count_whatever_the_latency():
    for rtt_s in (0.0, 0.1, 0.4):
        plan, bound = choose(64, sizes_of(32, 64), rtt_s=rtt_s)
        assert (plan.num_microbatches, bound) == (32, "overhead")


def test_a_count_whose_microbatches_no_memory_has_room_for_is_no_candidate():
    """Of 16 samples one microbatch of 16 fits, and none of 32."""
    plan, _ = choose(8, sizes_of(8), rtt_s=0.0, room=ROOM)
    assert plan.num_microbatches >= 8


def test_a_sizes_times_are_averaged_over_its_steps():
    sizes = Sizes()
    for both_s in (0.05, 0.07, 0.06):
        stage = StageCosts(forward_s=(both_s / 3,), backward_s=(both_s * 2 / 3,))
        sizes.add(4.0, [stage, stage])
    sizes.add(2.0, [StageCosts(forward_s=(0.01,), backward_s=(0.02,))] * 2)
    expected = sizes.at(8.0, seen_at(32, rtt_s=0.1), size=4.0)
    assert expected.stages[0].both_s == pytest.approx(0.12)


def test_a_direction_may_be_barred():
    sizes = sizes_of(32, 64)
    assert choose(64, sizes, rtt_s=0.0)[0].num_microbatches == 32
    assert choose(64, sizes, rtt_s=0.0, may_halve=False)[0].num_microbatches == 64
    assert choose(32, sizes, rtt_s=0.2, room=ROOM)[0].num_microbatches == 64
    barred, _ = choose(32, sizes, rtt_s=0.2, room=ROOM, may_double=False)
    assert barred.num_microbatches == 32


def test_a_count_that_was_just_left_is_not_gone_back_to():
    """Twice as many are predicted to be quicker, and turn out not to be."""
    controller = Controller(("virginia", "frankfurt"), counts=True)
    count, windows, counts = 32, (4, 1), []
    for number in range(1, 31):
        model = model_at(count, rtt_s=0.2)
        if count == 64:
            slow = [replace(each, backward_s=(0.06,)) for each in model.stages]
            model = replace(model, stages=slow)
        room = ROOM * count // NUM_SAMPLES
        step = simulate(model, num_microbatches=count, windows=windows)
        counts.append(count)
        change = controller.on_step(
            number,
            figures_of(number, model, step, memory=room),
            windows=windows,
            num_microbatches=count,
            num_samples=NUM_SAMPLES,
        )
        if change is not None:
            count, windows = change.plan.num_microbatches, change.plan.windows
    changes = [n for n, (a, b) in enumerate(itertools.pairwise(counts)) if a != b]
    assert len(changes) >= 2, counts
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(changes)), counts


def test_never_more_than_there_are_samples_nor_fewer_than_stages():
    plan, _ = choose(128, sizes_of(64, 128), rtt_s=0.4, room=2)
    assert plan.num_microbatches <= 128
    plan, _ = choose(2, sizes_of(2, 4), rtt_s=0.0)
    assert plan.num_microbatches >= 2


@pytest.mark.parametrize("seed", range(2))
def test_the_count_is_found_from_the_first_one_although_times_vary(seed):
    """RTT 20, 200, 20 ms with 20 % noise: from 8 microbatches to 32, then 64, and 32 again."""
    rng, reporter = Random(seed), Reporter()
    controller = Controller(("virginia", "frankfurt"), counts=True)
    count, windows = 8, (8, 1)
    counts, texts = [], []
    for number in range(1, 71):
        rtt_s = 0.2 if 26 <= number <= 45 else 0.02
        model = noisy(costs_at(count, rtt_s=rtt_s), rng, jitter_s=0.005)
        room = ROOM * count // NUM_SAMPLES
        held = tuple(min(window, room) for window in windows)
        step = simulate(model, num_microbatches=count, windows=held)
        counts.append(count)
        change = controller.on_step(
            number,
            reporter.figures_of(number, model, step, memory=room),
            windows=windows,
            num_microbatches=count,
            num_samples=NUM_SAMPLES,
        )
        if change is not None:
            count, windows = change.plan.num_microbatches, change.plan.windows
            texts.append(change.text)
    assert counts[10:25] == [32] * 15, texts
    assert counts[28:45] == [64] * 17, texts  # in three steps
    assert counts[55:] == [32] * 15, texts
    assert len(texts) <= 8, texts


def test_a_changed_count_and_its_windows_follow_the_link():
    """RTT 20, 200, 20 ms: 32 microbatches, 64, and 32 again."""
    controller = Controller(("virginia", "frankfurt"), counts=True)
    count, windows = 32, classic_windows(2)
    counts, times, texts = [], [], []
    for number in range(1, 61):
        rtt_s = 0.2 if 21 <= number <= 40 else 0.02
        model = model_at(count, rtt_s=rtt_s)
        step = simulate(model, num_microbatches=count, windows=windows, rng=Random(number))
        assert step.peak_in_flight[0] * NUM_SAMPLES / count <= ROOM
        counts.append(count)
        times.append(step.step_s)
        change = controller.on_step(
            number,
            figures_of(number, model, step, memory=ROOM * count // NUM_SAMPLES),
            windows=windows,
            num_microbatches=count,
            num_samples=NUM_SAMPLES,
        )
        if change is not None:
            count, windows = change.plan.num_microbatches, change.plan.windows
            texts.append(change.text)
    assert (counts[19], counts[39], counts[59]) == (32, 64, 32), texts
    fixed = model_at(32, rtt_s=0.2)
    best_fixed_s = simulate(fixed, num_microbatches=32, windows=(4, 4)).step_s
    assert times[39] <= 0.88 * best_fixed_s
    assert len(texts) <= 8, texts
    moved = next(text for text in texts if "microbatches 32 -> 64" in text and text > "step 2")
    assert "(set by memory)" in moved
