"""A controller in a loop with simulated steps: stages and links that change are followed."""

from dataclasses import replace
from random import Random

import pytest

from geotrain.control.controller import Controller
from geotrain.control.figures import Figures
from geotrain.control.ideal import ideal_step_s
from geotrain.pipeline.simulate import (
    Boundary,
    PipelineModel,
    simulate,
)
from tests.control.loop import NAMES, Loop, link
from tests.control.measured_line import figures_of
from tests.pipeline.lines import equal_stages, line, noisy


def test_the_first_step_is_enough_to_hide_a_link():
    loop = Loop(lambda _: line(link(0.05))).run(5)
    assert loop.changes == {
        1: "step 1: window 2,1 -> 4,1: delivery to frankfurt 58 ms, "
        "predicted step 3.85 -> 2.1 s (set by latency)"
    }
    assert loop.step_s[1] == pytest.approx(ideal_step_s(link(0.05)), rel=0.01)


def test_a_connection_that_still_finds_its_rate_is_no_slow_link():
    """The run begins with wide windows, and its first tensors take 240 ms each; later ones 8 ms."""
    loop = Loop(lambda step: line(link(0.2, mbit=35 if step == 1 else 1000)))
    loop.windows = (32, 1)
    loop.run(4)
    assert list(loop.changes) == [3]
    assert loop.windows == (9, 1)


def test_a_slow_link_is_taken_for_one_once_two_steps_showed_it():
    loop = Loop(lambda _: line(link(0.05, mbit=100)))
    loop.windows = (32, 1)
    loop.run(4)
    assert list(loop.changes) == [3]
    assert loop.changes[3].endswith("(set by rate)")
    assert loop.windows[0] < 8


def test_what_lies_at_the_receiver_is_no_delivery():
    """However wide the windows are: else they would grow by what they themselves made wait."""
    loop = Loop(lambda _: line(link(0.05)))
    loop.windows = (24, 1)
    loop.run(3)
    assert loop.windows == (4, 1)
    assert loop.changes == {
        3: "step 3: window 24,1 -> 4,1: delivery to frankfurt 58 ms, "
        "20 fewer in flight, predicted step still 2.1 s (set by latency)"
    }


def test_windows_follow_a_link_up_and_down():
    """RTT 20, then 300, then 20 ms."""

    def model_at(step: int) -> PipelineModel:
        return line(link(0.15 if 11 <= step <= 20 else 0.01))

    loop = Loop(model_at).run(30)
    assert list(loop.changes) == [1, 12, 22]
    assert "delivery to frankfurt 18 -> 158 ms" in loop.changes[12]
    for step_s in loop.step_s[12:20]:
        assert step_s <= ideal_step_s(link(0.15)) * 1.05
    for step_s in loop.step_s[23:]:
        assert step_s <= ideal_step_s(link(0.01)) * 1.05


def test_windows_follow_a_rate():
    """1000, then 200, then 1000 Mbit/s: a tensor takes 8, 42 and 8 ms."""

    def model_at(step: int) -> PipelineModel:
        return line(link(0.05, mbit=200 if 11 <= step <= 20 else 1000))

    loop = Loop(model_at).run(30)
    assert list(loop.changes) == [1, 12, 22]
    for step_s in loop.step_s[12:20]:
        assert step_s <= ideal_step_s(link(0.05, mbit=200)) * 1.05
    for step_s in loop.step_s[23:]:
        assert step_s <= ideal_step_s(link(0.05)) * 1.05


def test_a_link_too_slow_for_any_window_is_named():
    def model_at(step: int) -> PipelineModel:
        return line(link(0.05, mbit=100 if step > 5 else 1000))

    loop = Loop(model_at).run(12)
    assert all("set by rate" in text for step, text in loop.changes.items() if step > 5)
    wide = simulate(model_at(9), num_microbatches=32, windows=(32, 32)).step_s
    assert loop.step_s[-1] <= wide * 1.05


def test_a_slower_stage_is_followed_too():
    def model_at(step: int) -> PipelineModel:
        costs = link(0.1)
        slow = step > 10
        return line(replace(costs, backward_s=[0.04, 0.08 if slow else 0.04]))

    loop = Loop(model_at).run(20)
    assert all(
        "a microbatch in frankfurt 60 -> 100 ms" in t for s, t in loop.changes.items() if s > 1
    )


LONG, SHORT = link(0.15), link(0.01)


@pytest.mark.parametrize(
    ("one", "other", "seed"),
    [
        (SHORT, LONG, 0),
        (link(0.05), link(0.05, mbit=200), 1),
        (link(0.05), link(0.05, mbit=100), 2),
    ],
    ids=["rtt", "rate", "rate too low"],
)
def test_a_noisy_link_that_changes_in_mid_step_is_followed_within_three_steps(one, other, seed):
    """It goes to and fro every 20 steps, 400 steps long, at any microbatch of a step."""
    rng = Random(seed)

    def model_at(step: int) -> PipelineModel:
        phase, at = divmod(step - 1, 20)
        now, before = (one, other) if phase % 2 == 0 else (other, one)
        if at > 0 or step == 1:
            return noisy(now, rng, jitter_s=0.005)
        # The step in which it changes: times of both, by microbatch.
        quick, slow = sorted((now, before), key=lambda c: c.latency_s[0] + c.transfer_s[0])
        more_s = slow.latency_s[0] + slow.transfer_s[0] - quick.latency_s[0] - quick.transfer_s[0]
        border = rng.randrange(1, 32)
        model = noisy(quick, rng, jitter_s=0.005, late_from=border, late_s=more_s)
        if now is slow:
            return model
        (boundary,) = model.boundaries
        way = replace(boundary.forward, jitter_s=tuple(boundary.forward.jitter_s[::-1]))
        return replace(model, boundaries=[Boundary(forward=way, backward=way)])

    loop = Loop(model_at)
    loop.compares = True
    loop.run(400)
    for phase in range(1, 20):
        first = 20 * phase  # index of the step in which the link changed
        # Three steps to follow in: from the fourth on each is as quick as with any window.
        for at in range(first + 3, first + 20):
            assert loop.step_s[at] <= loop.best_s[at] * 1.05, (phase, at, loop.changes)
    # Not restless: a change each phase, and one more in a few.
    assert len(loop.changes) <= 1.5 * 20, loop.changes


def test_of_two_steps_that_moved_the_lesser_move_counts():
    """As where a link changed in mid-step, or where many tensors had bad luck at once."""
    one_way_s = {11: 0.5}
    loop = Loop(lambda step: line(link(one_way_s.get(step, 0.1 if step > 11 else 0.01)))).run(14)
    assert loop.windows == (6, 1), loop.changes


def test_a_regions_own_limit_holds():
    loop = Loop(lambda _: line(link(0.1)))
    loop.limits = (3, 0)
    loop.run(3)
    assert loop.windows == (3, 1)
    assert loop.changes[1].endswith("(set by memory)")


def test_four_regions_in_a_line():
    costs = equal_stages(4, one_way_s=0.05, num_microbatches=64)
    loop = Loop(lambda _: line(costs), count=64).run(3)
    assert loop.step_s[-1] <= ideal_step_s(costs) * 1.01


def test_a_short_batch_and_an_empty_one_decide_nothing():
    loop = Loop(lambda _: line(link(0.05))).run(2)
    model = line(link(0.5))
    for count in (2, 2, 2):
        step = simulate(model, num_microbatches=count, windows=(2, 1))
        figures = figures_of(len(loop.step_s) + 1, model, step)
        decided = loop.controller.on_step(
            3, figures, windows=(2, 1), num_microbatches=count, num_samples=2
        )
        assert decided is None
    nothing = [Figures(), Figures()]
    empty = {"windows": (2, 1), "num_microbatches": 0, "num_samples": 8}
    assert Controller(NAMES[:2]).on_step(1, nothing, **empty) is None


def test_regions_that_train_nothing_report_no_backward():
    model = line(link(0.05))
    step = simulate(model, num_microbatches=8, windows=(2, 1))
    upper, lower = figures_of(1, model, step)
    upper = replace(upper, backward_us=(), held_from_down=())
    lower = replace(lower, sent_up=())
    change = Controller(NAMES[:2]).on_step(
        1, [upper, lower], windows=(2, 1), num_microbatches=8, num_samples=8
    )
    assert change is None or change.plan.windows[0] >= 2


def test_one_region_has_nothing_to_follow():
    model = line(equal_stages(1, one_way_s=0.0))
    step = simulate(model, num_microbatches=4, windows=(1,))
    controller = Controller(NAMES[:1])
    for number in (1, 2):
        figures = figures_of(number, model, step)
        kept = {"windows": (1,), "num_microbatches": 4, "num_samples": 4}
        assert controller.on_step(number, figures, **kept) is None


# The rates that connections found, in Mbit/s: over the emulator at a round trip of 400 ms.
FOUND = [[68, 83, 91, 160, 181], [68, 127, 178, 191, 240, 344], [70, 100, 110, 190, 400, 1000]]


@pytest.mark.parametrize("one_way_s", [0.05, 0.2])
@pytest.mark.parametrize("rates", FOUND)
def test_a_link_that_only_finds_its_rate_gets_its_windows_once_it_has(one_way_s, rates):
    """Beside a long latency a rate hardly shows in a delivery's time."""

    def model_at(step: int) -> PipelineModel:
        return line(link(one_way_s, mbit=rates[min(step, len(rates)) - 1]))

    loop = Loop(model_at)
    loop.windows = (32, 1)
    loop.run(14)
    wide = simulate(model_at(14), num_microbatches=32, windows=(32, 32))
    assert loop.step_s[-1] <= 1.02 * wide.step_s, loop.changes


def test_while_a_link_finds_its_rate_windows_stay_as_wide_as_they_were():
    rates = [40, 80, 160, 1000]
    loop = Loop(lambda step: line(link(0.2, mbit=rates[min(step, len(rates)) - 1])))
    loop.windows = (32, 1)
    loop.run(4)
    assert not loop.changes
    loop.run(7)
    assert len(loop.changes) == 1
