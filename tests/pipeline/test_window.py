"""Which windows hide the delay of the links."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.pipeline.window import classic_windows, resolve_windows, windows_for_latency

DELAYS = st.lists(st.floats(0.0, 2.0), min_size=0, max_size=6)


@pytest.mark.parametrize(
    ("delays_s", "windows"),
    [
        ([0.0], (2, 1)),
        ([0.0084], (3, 1)),
        ([0.0584], (4, 1)),
        ([0.1084], (6, 1)),
        ([0.0584, 0.0584], (7, 4, 1)),
        ([], (1,)),
    ],
)
def test_each_boundary_adds_its_round_trip_in_microbatches(delays_s, windows):
    assert windows_for_latency(delays_s, delays_s, slowest_s=0.06) == windows


def test_wide_windows_are_all_microbatches_but_for_the_last_stage():
    assert resolve_windows("wide", num_stages=3, num_microbatches=12) == (12, 12, 1)


def test_boundaries_are_rounded_one_by_one():
    # Together 0.09 s are 1.5 microbatches, and so 2; each by itself is 0.75, and so 1.
    assert windows_for_latency([0.045] * 2, [0.0] * 2, slowest_s=0.06) == (5, 3, 1)
    # 0.066 s in all are 2 microbatches, and one by one 3 times 1.
    assert windows_for_latency([0.022] * 3, [0.0] * 3, slowest_s=0.06)[0] == 4 + 3


def test_a_whole_number_of_microbatches_is_not_rounded_up():
    assert windows_for_latency([0.06], [0.06], slowest_s=0.06) == (4, 1)
    assert windows_for_latency([0.1], [0.2], slowest_s=0.1) == (5, 1)


def test_directions_may_differ():
    assert windows_for_latency([0.01], [0.11], slowest_s=0.06) == (4, 1)


@given(DELAYS, st.floats(0.001, 1.0))
def test_they_fall_along_the_line_and_are_no_less_than_the_classic_ones(delays_s, slowest_s):
    windows = windows_for_latency(delays_s, delays_s, slowest_s=slowest_s)
    assert windows[-1] == 1
    assert all(a > b for a, b in itertools.pairwise(windows))
    classic = classic_windows(len(windows))
    assert all(a >= b for a, b in zip(windows, classic, strict=True))
    assert windows_for_latency([0.0] * len(delays_s), [0.0] * len(delays_s), slowest_s=1.0) == (
        classic
    )


def test_a_number_holds_for_all_but_the_last_and_none_exceeds_the_microbatches():
    assert resolve_windows(8, num_stages=3, num_microbatches=4) == (4, 4, 1)
    assert resolve_windows("classic", num_stages=3, num_microbatches=2) == (2, 2, 1)
    assert resolve_windows([7, 4, 1], num_stages=3, num_microbatches=32) == (7, 4, 1)
