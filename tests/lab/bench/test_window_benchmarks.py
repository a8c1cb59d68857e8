"""What the scripts of windows and of the simulator make of runs, without running any."""

import pytest

from geotrain.commands.bench import parse
from geotrain.control.journal import Journal
from tests.benchmarks import auto_windows, simulator_check


def test_every_width_has_its_turns_and_its_first_steps_do_not_count():
    entries = auto_windows.plans([2, 5], turns=2, steps=3)
    journal = Journal(entries)
    windows = [journal.at(step).windows[0] for step in range(1, 14)]
    assert windows == [16, 2, 2, 2, 5, 5, 5, 2, 2, 2, 5, 5, 5]
    times = [9.0, 8.0, 1.0, 1.2, 8.0, 2.0, 2.0, 8.0, 1.2, 1.2, 8.0, 2.0, 2.0]
    result = {"all_windows": [[w, 1] for w in windows], "all_step_s": times}
    assert auto_windows.by_width(result, steps=3) == {2: pytest.approx(1.2), 5: 2.0}


def test_there_are_ten_links_and_twelve_windows():
    assert len(set(auto_windows.LINKS)) == 10
    assert len(set(auto_windows.WIDTHS)) == 12


def test_twenty_settings_none_of_which_the_profile_has():
    settings = [(s.rtt_ms, s.mbit, plan) for s in simulator_check.RUNS for plan in s.plans]
    assert len(set(settings)) == 20
    profile = simulator_check.PROFILE
    assert (profile.rtt_ms, profile.mbit) not in {(rtt, mbit) for rtt, mbit, _ in settings}
    for setup in (profile, *simulator_check.RUNS):
        parse(["step", *setup.options])
        assert all(len(windows) == len(setup.overhead_ms) for _, windows in setup.plans)


def test_what_the_machine_adds_makes_a_prediction_longer():
    setup = simulator_check.RUNS[1]
    costs = simulator_check.costs_of(setup, 32)
    bare_s = simulator_check.predicted_s(costs, (16, 1), (0.0, 0.0))
    added_s = simulator_check.predicted_s(costs, (16, 1), (0.001, 0.002))
    assert added_s - bare_s == pytest.approx(33 * 0.003, rel=0.02)
