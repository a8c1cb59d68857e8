"""The CSV schedules that torch is given, also as torch's own checks see them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _validate_schedule

from geotrain.lab.bench.schedule import rows, stage_widths, warm_up_widths


def text(widths: list[int], num_microbatches: int) -> list[str]:
    return [" ".join(row) for row in rows(widths, num_microbatches)]


def test_the_classic_width_is_1f1b():
    assert text([2, 1], 3) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_a_wider_warm_up_runs_more_forwards_first():
    assert text([3, 1], 3)[0] == "0F0 0F1 0F2 0B0 0B1 0B2"


@pytest.mark.parametrize(
    ("guess", "num_microbatches", "widths"),
    [
        (4, 32, [3, 4, 5, 6, 8, 32]),
        (6, 32, [5, 6, 7, 8, 12, 32]),
        (3, 32, [2, 3, 4, 5, 6, 32]),
        (30, 32, [2, 28, 29, 30, 31, 32]),
        (4, 2, [2]),
        (4, 1, [1]),
    ],
)
def test_six_widths_around_the_one_that_should_do(guess, num_microbatches, widths):
    assert warm_up_widths(guess, num_stages=2, num_microbatches=num_microbatches) == widths


@given(st.integers(1, 80), st.integers(2, 8), st.integers(1, 64))
def test_they_are_distinct_and_possible(guess, num_stages, num_microbatches):
    widths = warm_up_widths(guess, num_stages=num_stages, num_microbatches=num_microbatches)
    low = min(num_stages, num_microbatches)
    assert widths == sorted(set(widths))
    assert all(low <= width <= num_microbatches for width in widths)
    assert len(widths) == min(6, num_microbatches - low + 1)


@given(st.integers(2, 6), st.integers(1, 24), st.data())
def test_torch_finds_every_schedule_complete(num_stages, num_microbatches, data):
    low = min(num_stages, num_microbatches)
    first = data.draw(st.integers(low, num_microbatches))
    widths = stage_widths(first, num_stages=num_stages, num_microbatches=num_microbatches)
    assert widths[-1] == 1
    assert widths == sorted(widths, reverse=True)
    actions = {
        rank: [_Action.from_str(action) for action in row]
        for rank, row in enumerate(rows(widths, num_microbatches))
    }
    _validate_schedule(actions, num_stages, num_stages, num_microbatches)
