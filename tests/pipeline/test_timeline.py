"""A step drawn with characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.pipeline.timed import Trace
from geotrain.pipeline.timeline import ASCII, Glyphs, draw
from tests.pipeline.lines import any_costs, run

TRACE = Trace.parse("0F0 0 1\n0SEND_F0 1 3\n1F0 2 3\n1B0 3 5\n0B0 6 8\n")


def test_a_column_shows_what_took_most_of_it():
    lines = draw(TRACE, ["one", "two"], end_s=8.0, width=12, glyphs=ASCII)
    assert lines == ["one f.....BB", "two ..fBB...", "    08.000 s"]


def test_an_action_shorter_than_half_a_column_does_not_show():
    assert draw(TRACE, ["a", "b"], end_s=30.0, width=12, glyphs=ASCII)[0] == "a ..B......."
    assert draw(TRACE, ["a", "b"], end_s=300.0, width=12, glyphs=ASCII)[0] == "a .........."


def test_glyphs_differ_without_colour():
    for glyphs in (Glyphs(), ASCII):
        assert len({glyphs.forward, glyphs.backward, glyphs.idle}) == 3
        assert glyphs.legend.endswith("idle")


@given(any_costs(), st.integers(40, 120))
def test_no_line_is_longer_than_asked(costs, width):
    names = [f"a-region-with-a-name-{index}" for index in range(len(costs.forward_s))]
    step = run(costs, (3,) * len(names))
    lines = draw(step.trace, names, end_s=step.step_s, width=width, glyphs=Glyphs())
    assert len(lines) == len(names) + 1
    assert {len(line) for line in lines} == {width}


@pytest.mark.parametrize("end_s", [0.0, 1e-12])
def test_a_step_without_time_is_no_error(end_s):
    assert draw(Trace(()), ["a"], end_s=end_s, width=20, glyphs=ASCII)[0] == "a " + "." * 18
