"""What a region puts in its vote, and what the first region makes of all of them."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from geotrain.control.figures import MAX_ENTRIES, RECORD, Figures, Hold, Passage
from geotrain.control.votes import Vote
from geotrain.pipeline.following import Following, measure
from geotrain.pipeline.runtime import Account
from geotrain.pipeline.schedule import Action
from geotrain.pipeline.simulate import simulate
from geotrain.pipeline.trace import TracedAction
from geotrain.transport.attachment_times import Hold as StreamHold
from geotrain.transport.attachment_times import Passage as StreamPassage
from tests.control.measured_line import figures_of
from tests.pipeline.lines import equal_stages, line

STAGE = SimpleNamespace(meter=None)
MODEL = line(equal_stages(2, one_way_s=0.1))


class FakeEdge:
    """Stands where an Edge does."""

    slots = 9

    def __init__(self, passages: list[StreamPassage], holds: list[StreamHold]) -> None:
        self._passages, self._holds = passages, holds

    def take_times(self) -> tuple[list[StreamPassage], list[StreamHold]]:
        return self._passages, self._holds


def context(*, index: int = 0, window: object = "auto", names=("virginia", "frankfurt"), **parts):
    place = SimpleNamespace(
        window=window,
        region_names=names,
        is_first=index == 0,
        in_flight_limit=6,
        in_flight_samples=None,
        num_microbatches=32,
        replay=None,
        plan_log=None,
    )
    place.index, place.device = index, torch.device("cpu")
    edges = {"upstream": None, "downstream": None, "segment": nn.Linear(2, 2)} | parts
    return SimpleNamespace(place=place, parts=SimpleNamespace(**edges), window="classic")


def account(*runs: str) -> Account:
    done = Account()
    for number, text in enumerate(runs):
        action = Action.parse(text)
        done.trace.append(
            TracedAction(
                kind=action.kind,
                microbatch=action.microbatch,
                begin_s=float(number),
                end_s=number + 0.5,
            )
        )
    return done


def opening(number: int, windows: tuple[int, ...], count: int = 32):
    return SimpleNamespace(
        number=number,
        windows=windows,
        num_samples=64,
        work=SimpleNamespace(num_microbatches=count),
    )


OPENING = opening(1, (2, 1))


def votes(number: int, windows: tuple[int, ...]) -> list[Vote]:
    step = simulate(MODEL, num_microbatches=32, windows=windows)
    reports = figures_of(number, MODEL, step)
    made = [Vote(region=index, finite=True, figures=each) for index, each in enumerate(reports)]
    return made[::-1]  # in the order in which they come up the line


def test_the_first_region_announces_the_windows_that_hide_the_link(caplog):
    around = context()
    with caplog.at_level(logging.INFO):
        Following(around, STAGE).on_votes(votes(1, (2, 1)), opening(1, (2, 1)))
    assert around.window == (6, 1)
    assert [record.message for record in caplog.records] == [
        "step 1: window 2,1 -> 6,1: delivery to frankfurt 108 ms, predicted step 5.45 -> 2.2 s "
        "(set by latency)"
    ]


@pytest.mark.parametrize(
    "around",
    [context(index=1), context(window="classic"), context(window=(2, 1)), context(names=("a",))],
)
def test_the_others_and_fixed_windows_decide_nothing(around):
    Following(around, STAGE).on_votes(votes(1, (2, 1)), opening(1, (2, 1)))
    assert around.window == "classic"


def test_votes_without_figures_decide_nothing():
    around = context()
    bare = [Vote(region=index, finite=True) for index in range(2)]
    Following(around, STAGE).on_votes(bare, opening(1, (2, 1)))
    assert around.window == "classic"


def test_only_where_windows_are_automatic_are_figures_sent():
    assert (
        Following(context(window="classic"), STAGE).figures(account("0F0", "0B0"), OPENING) is None
    )
    assert Following(context(index=1), STAGE).figures(account("1F0", "1B0"), OPENING) == Figures(
        forward_us=(500_000,), backward_us=(500_000,), in_flight_limit=6
    )


class FakeMeter:
    """Stands where an ActivationMeter does."""

    seen_bytes: int | None = None

    def __init__(self, *kept_bytes: int) -> None:
        self._kept_bytes = list(kept_bytes)

    def take(self) -> int:
        return self._kept_bytes.pop(0)


def limits_after(*kept_bytes: int, counts: tuple[int, ...]) -> list[int]:
    """The memory limits of steps whose microbatches kept so much."""
    following = Following(context(), SimpleNamespace(meter=None))
    following._meter = FakeMeter(*kept_bytes)
    steps = [opening(1, (2, 1), count=count) for count in counts]
    return [following.figures(account("0F0", "0B0"), step).memory_limit for step in steps]


def test_memory_bounds_what_is_in_flight_but_never_below_what_the_run_began_with():
    assert limits_after(1 << 60, counts=(32,)) == [2]
    assert limits_after(1, counts=(32,))[0] > 1000
    assert limits_after(0, counts=(32,)) == [0]


def test_the_largest_microbatch_of_a_size_counts_and_sizes_are_told_apart():
    """A short last batch in between, of which nothing was measured, makes nobody forget."""
    many = limits_after(1, 1 << 60, 1, 0, counts=(32, 64, 32, 64))
    assert many[0] > 1000 and many[2] > 1000
    assert many[1] == many[3] == 2


@pytest.mark.parametrize(("count", "room"), [(32, 4), (64, 8), (4, 1)])
def test_a_limit_in_samples_is_told_in_microbatches_of_the_steps_size(count, room):
    around = context()
    around.place.in_flight_samples = 8
    following = Following(around, SimpleNamespace(meter=None))
    following._meter = FakeMeter(1)
    figures = following.figures(account("0F0", "0B0"), opening(1, (2, 1), count=count))
    assert figures.memory_limit == room  # of 64 samples


SPARE = 10_000_000


def first_step(monkeypatch, *, spare: int | None = SPARE) -> tuple[Following, FakeMeter]:
    monkeypatch.setattr("geotrain.pipeline.following.spare_bytes", lambda device: spare)
    following = Following(context(names=("a", "b", "c")), SimpleNamespace(meter=None))
    following._meter = meter = FakeMeter(100_000)
    return following, meter


def test_the_first_microbatch_shows_how_many_may_follow_it_in_the_first_step(monkeypatch):
    following, meter = first_step(monkeypatch)
    assert following.room() == 3  # as with 1F1B, while nothing is known
    meter.seen_bytes = 100_000
    # Of what was free at first, less the segment's gradients and an optimizer's state of 6 floats.
    assert following.room() == (SPARE - 3 * 6 * 4) * 4 // 5 // 100_000 == 79
    following.figures(account("0F0", "0B0"), opening(1, (32, 32, 1)))
    assert following.room() == sys.maxsize  # from here on the plan's windows do


def test_a_first_microbatch_for_which_memory_hardly_suffices_leaves_1f1bs_own(monkeypatch):
    following, meter = first_step(monkeypatch)
    assert following.room() == 3
    meter.seen_bytes = SPARE
    assert following.room() == 3


@pytest.mark.parametrize(("kept_bytes", "spare"), [(0, SPARE), (100, None)])
def test_where_nothing_is_kept_or_nothing_is_known_only_the_window_bounds(
    monkeypatch, kept_bytes, spare
):
    following, meter = first_step(monkeypatch, spare=spare)
    following.room()
    meter.seen_bytes = kept_bytes
    assert following.room() == sys.maxsize


def test_windows_that_are_fixed_have_no_such_bound():
    assert Following(context(window="classic"), STAGE).room() == sys.maxsize


def test_figures_are_of_this_regions_two_edges():
    down = FakeEdge(
        [
            StreamPassage("begin", 12, -1, 99.0, 99.1),
            StreamPassage("forward", 5, 0, 99.5, 99.75),
            StreamPassage("evaluate", 5, 0, 99.5, 99.75),
            StreamPassage("decide", 12, -1, 99.5, 99.75),
        ],
        [StreamHold("backward", 5, 0, 0.125), StreamHold("vote", 12, -1, 4.0)],
    )
    up = FakeEdge([StreamPassage("backward", 4, 7, 98.0, 98.5)], [StreamHold("begin", 12, -1, 3.0)])
    figures = measure(
        context(upstream=up, downstream=down), account("1F0", "1B0"), memory_limit=5, now=100.0
    )
    assert figures.sent_down == (
        Passage(12, RECORD, -1_000_000, 100_000),
        Passage(5, 0, -500_000, 250_000),
    )
    assert figures.held_from_down == (Hold(5, 0, 125_000),)
    assert figures.sent_up == (Passage(4, 7, -2_000_000, 500_000),)
    assert figures.held_from_up == (Hold(12, RECORD, 3_000_000),)
    assert (figures.slots_down, figures.slots_up) == (9, 9)
    assert (figures.in_flight_limit, figures.memory_limit) == (6, 5)


def test_a_report_has_its_limit_also_with_an_opening():
    passages = [StreamPassage("forward", 5, m, 0.0, 0.1) for m in range(200)]
    passages.append(StreamPassage("begin", 12, -1, 0.0, 0.1))
    edge = FakeEdge(passages, [])
    figures = measure(context(downstream=edge), account(), memory_limit=0, now=1.0)
    assert len(figures.sent_down) == MAX_ENTRIES
    assert figures.sent_down[0].microbatch == RECORD
