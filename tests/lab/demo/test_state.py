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


def hear(state, index, *, now, received, **link):
    record = status_record(index, options=OPTIONS, bytes_received=received, **link)
    state.on_status(index, record, now=now)


def test_a_link_is_silent_when_either_end_hears_nothing_for_longer_than_pings_take():
    state = RunState(OPTIONS, started_at=0.0)
    one, other, third = state.regions
    assert state.silent_s(one, other) is None
    for now in (0.0, 3.0, 3.3):  # 3 s and two round trips of 0.1 s
        for index in (0, 1):
            hear(state, index, now=now, received=7 + index * int(now * 10))
    assert one.silent_s("frankfurt") == 3.3
    assert state.silent_s(one, other) == 3.3
    assert state.silent_s(other, third) is None
    hear(state, 0, now=3.4, received=8)
    assert state.silent_s(one, other) is None
    hear(state, 1, now=12.3, received=40)  # only one direction is cut
    assert state.silent_s(one, other) == pytest.approx(9.0)


def test_a_long_round_trip_is_no_silence():
    state = RunState(OPTIONS, started_at=0.0)
    for now in (0.0, 12.0):
        hear(state, 0, now=now, received=7, rtt_s={"last": 5.0})
    assert state.silent_s(*state.regions[:2]) is None


@pytest.mark.parametrize(("now", "step_s", "age"), [(4.9, 1.0, None), (6.2, 1.0, 3.2)])
def test_the_newest_step_is_old_after_three_steps(now, step_s, age):
    state = running(2)
    assert state.stale_s(now=now) == pytest.approx(age)
    state.ended_at = 4.0
    assert state.stale_s(now=now) is None


def test_short_steps_are_not_old_within_two_seconds():
    state = RunState(OPTIONS, started_at=0.0)
    assert state.stale_s(now=50.0) is None
    state.on_line(0, step_line(0, 1, options=OPTIONS, step_s=0.1))
    assert state.stale_s(now=2.9) is None
    assert state.stale_s(now=3.1) == pytest.approx(2.1)


def test_the_rate_of_bytes_counts_from_the_first_step():
    state = RunState(OPTIONS, started_at=0.0)
    first = state.regions[0]
    hear(state, 0, now=0.0, received=0, bytes_sent=0)
    state.on_line(0, step_line(0, 20, options=OPTIONS))
    hear(state, 0, now=20.5, received=0, bytes_sent=1000)
    assert first.sent_bytes_per_s == 0.0
    hear(state, 0, now=22.5, received=0, bytes_sent=5000)
    assert (first.bytes_sent, first.sent_bytes_per_s) == (5000, 2000.0)


def test_what_is_being_started_is_told():
    state = RunState(OPTIONS, started_at=0.0)
    assert state.starting() == "3 daemons start, training processes import torch"
    state.num_listening = 3
    for index in (0, 1):
        state.on_status(index, status_record(index, options=OPTIONS), now=1.0)
    assert state.starting() == "3 daemons listen, training processes import torch"
    state.on_status(2, status_record(2, options=OPTIONS), now=1.0)
    assert state.starting().endswith("the first step is under way")
    assert RunState(Options(regions=1), started_at=0.0).starting().startswith("a training process")


@pytest.mark.parametrize("record", [{}, {"step": 1}, 7, [], None], ids=str)
def test_what_is_no_step_is_refused(record):
    with pytest.raises((KeyError, TypeError, ValueError)):
        StepLine.from_json(record)
