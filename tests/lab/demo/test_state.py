"""What is known of a running demo."""

import pytest

from geotrain.lab.demo.options import Options
from geotrain.lab.demo.state import RunState, StepLine
from tests.lab.demo.running import running, status_record, step_line

OPTIONS = Options(regions=3, microbatches=4)


def test_the_last_whole_step_is_the_newest_that_every_region_has_told():
    state = RunState(OPTIONS, started_at=0.0)
    assert state.last_whole_step() is None
    for index, step in ((0, 1), (1, 1), (0, 2)):
        state.on_line(index, step_line(index, step, options=OPTIONS))
    assert state.last_whole_step() is None
    state.on_line(2, step_line(2, 1, options=OPTIONS))
    assert [line.step for line in state.last_whole_step()] == [1, 1, 1]
    for index in (1, 2):
        state.on_line(index, step_line(index, 2, options=OPTIONS))
    assert [line.step for line in state.last_whole_step()] == [2, 2, 2]


def test_a_region_whose_lines_stay_away_holds_back_the_picture_and_nothing_else():
    state = running(3)
    for step in range(4, 20):
        for index in (0, 1):
            state.on_line(index, step_line(index, step, options=OPTIONS))
    assert state.last_whole_step() is None
    assert (len(state.losses), state.median_step_s) == (19, 1.0)


def test_bubble_and_in_flight_come_from_the_trace():
    state = running(2)
    line = state.regions[0].lines[-1]
    assert line.bubble == pytest.approx(1 - (4 * 0.02 + 4 * 0.04))
    assert line.most_in_flight == 4
    assert line.began_s == 2.0


def test_medians_leave_out_the_first_step():
    state = RunState(Options(), started_at=0.0)
    for step, step_s in ((1, 9.0), (2, 1.0), (3, 3.0), (4, 2.0)):
        state.on_line(0, step_line(0, step, options=OPTIONS, step_s=step_s))
    assert state.median_step_s == 2.0
    assert len(state.regions[0].forward_s) == 3
    assert state.regions[0].forward_s == [pytest.approx(0.02)] * 3


def test_actions_and_links_are_empty_until_a_daemon_has_spoken():
    state = RunState(OPTIONS, started_at=0.0)
    assert (state.regions[0].action, state.regions[0].link("frankfurt")) == ("", {})
    state.on_status(0, {"ranks": [], "links": {}}, now=0.0)
    assert state.regions[0].action == ""
    state.on_status(0, status_record(0, options=OPTIONS, action="attaching"), now=1.0)
    assert state.regions[0].action == "attaching"
    assert state.regions[0].link("frankfurt")["state"] == "connected"


@pytest.mark.parametrize("record", [{}, {"step": 1}, 7, [], None], ids=str)
def test_what_is_no_step_is_refused(record):
    with pytest.raises((KeyError, TypeError, ValueError)):
        StepLine.from_json(record)
