"""Pictures of one row."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.lab.demo.strips import ASCII, sparkline, timeline_row
from geotrain.pipeline.trace import TracedAction


def ran(*actions):
    """(kind, microbatch, begin, end) each."""
    return [
        TracedAction(kind=kind, microbatch=microbatch, begin_s=begin_s, end_s=end_s)
        for kind, microbatch, begin_s, end_s in actions
    ]


def drawn(trace, width, *, end_s=10.0):
    runs = timeline_row(trace, begin_s=0.0, end_s=end_s, width=width, glyphs=ASCII)
    return "".join(text for _, text in runs)


def test_each_action_has_its_share_of_the_row_and_its_number():
    trace = ran(("F", 0, 0, 2), ("F", 1, 2, 4), ("B", 0, 6, 9))
    assert drawn(trace, 10) == "0f1f..0BB."
    assert drawn(trace, 20) == "0fff1fff....0BBBBB.."


def test_a_number_stands_only_where_the_kind_still_shows():
    assert drawn(ran(("F", 7, 0, 1)), 10) == "f........."
    assert drawn(ran(("B", 12, 0, 2)), 10) == "BB........"
    assert drawn(ran(("B", 12, 0, 3)), 10) == "12B......."


def test_kinds_keep_their_names_for_whoever_colours_them():
    trace = ran(("F", 0, 0, 5), ("B", 0, 5, 10))
    runs = timeline_row(trace, begin_s=0.0, end_s=10.0, width=8)
    assert runs == [("F", "0▒▒▒"), ("B", "0███")]


def test_a_column_shows_what_took_most_of_it():
    short = [("F", m, m / 10, m / 10 + 0.06) for m in range(10)]
    assert drawn(ran(*short), 10) == "f........."
    half_idle = [("F", m, m / 10, m / 10 + 0.04) for m in range(10)]
    assert drawn(ran(*half_idle), 10) == ".........."
    assert drawn(ran(("F", 0, 0, 0.4), ("B", 0, 0.4, 1.0)), 10) == "B........."


def test_what_ran_outside_the_step_is_cut_off():
    trace = ran(("F", 0, -3, 1), ("B", 0, 9, 14), ("B", 1, 20, 30))
    assert drawn(trace, 10) == "f........B"
    assert drawn(trace, 10, end_s=0.0) == ".........."


@given(
    st.lists(st.tuples(st.sampled_from("FB"), st.floats(0, 2), st.floats(0, 2)), max_size=40),
    st.integers(1, 200),
)
def test_any_trace_fills_exactly_the_width(steps, width):
    now, trace = 0.0, []
    for number, (kind, idle_s, busy_s) in enumerate(steps):
        trace.append((kind, number, now + idle_s, now + idle_s + busy_s))
        now += idle_s + busy_s
    assert len(drawn(ran(*trace), width, end_s=now)) == width


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 10, ""),
        ([3.0], 10, "0"),
        ([3.0, 3.0], 10, "00"),
        ([0, 1, 2, 3, 4], 10, "01234"),
        ([0, 0, 4, 4], 2, "04"),
        ([4, 3, 2, 1, 0, 0], 3, "420"),
        ([0, math.nan, 4], 10, "0!4"),
        ([math.inf], 10, "!"),
        ([1, 2], 0, ""),
    ],
)
def test_sparkline(values, width, line):
    assert sparkline(values, width=width, sparks="01234") == line
