"""What is said of each phase of a run whose links change."""

import pytest

from geotrain.control.journal import Entry
from geotrain.errors import ConfigError
from geotrain.lab.bench.options import BenchOptions, Script, Work
from geotrain.lab.bench.phases import phase_lines, phase_rows, phases_of

THERE_AND_BACK = """
[[change]]
at_s = 10
rtt_ms = 300
why = "a detour"
[[change]]
at_s = 20
rtt_ms = 20
"""


def options(text: str, *, regions: int = 2, **others) -> BenchOptions:
    work = Work(
        forward_s=[0.02] * regions,
        backward_s=[0.04] * regions,
        boundary_bytes=1_250_000,
        num_microbatches=32,
        steps=12,
    )
    given = {"rtt_s": 0.02, "window": "auto"} | others
    return BenchOptions(work=work, script=Script(text=text, file="weather.toml"), **given)


def steps(*ended_s: float, windows: tuple[tuple[int, int], ...]) -> list[dict]:
    began_s, found = 98.0, []
    for number, (end_s, each) in enumerate(zip(ended_s, windows, strict=True), start=1):
        step = {"step": number, "step_s": end_s - began_s, "ended_s": end_s}
        found.append(step | {"windows": list(each), "num_microbatches": 32})
        began_s = end_s
    return found


def test_each_change_begins_a_phase_with_the_links_as_they_then_are():
    first, second, third = phases_of(options(THERE_AND_BACK))
    assert [phase.at_s for phase in (first, second, third)] == [0.0, 10.0, 20.0]
    assert [phase.links[0][0].delay_s for phase in (first, second, third)] == [0.01, 0.15, 0.01]
    assert (first.change, "a detour" in second.change) == ("", True)
    assert third.links[0][1].rate_bytes_per_s == 125e6


def test_changes_at_one_time_are_one_phase_and_may_be_of_one_link():
    names = options(THERE_AND_BACK, regions=3).names
    text = "".join(
        f'[[change]]\nat_s = 5\n{key} = "{names[1]}"\nmbit = {mbit}\n'
        for key, mbit in (("from", 100), ("to", 200))
    )
    _, phase = phases_of(options(text, regions=3))
    rates = [[way.rate_bytes_per_s * 8e-6 for way in pair] for pair in phase.links]
    assert rates == [[200.0, 100.0], [100.0, 200.0]]
    assert "100" not in phase.change.split(";")[1]


def test_a_script_that_cannot_work_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"weather\.toml: change 1: .*rtt"):
        phases_of(options("[[change]]\nat_s = 1\nrtt = 3\n"))


def test_steps_fall_into_phases_and_the_one_that_saw_the_change_counts_for_neither():
    narrow, wide = (3, 1), (8, 1)
    taken = steps(
        *(102.0, 104.0, 106.0, 108.0, 112.0, 115.0, 117.5, 120.0),
        windows=(narrow, narrow, narrow, narrow, narrow, narrow, wide, wide),
    )
    plans = [
        Entry(step=1, num_microbatches=32, windows=narrow, why="as the run began"),
        Entry(step=7, num_microbatches=32, windows=wide, why="step 6: window 3,1 -> 8,1"),
    ]
    rows = phase_rows(options(THERE_AND_BACK), taken, plans, started_s=100.5)
    first, second, third = rows
    assert (first["first_step"], first["num_steps"], first["step_s"]) == (1, 4, 2.0)
    assert first["new_plans"] == []
    assert (second["first_step"], second["num_steps"]) == (5, 4)
    assert second["step_s"] == 2.5  # of 3.0, 2.5 and 2.5; the one of 4 s saw the change
    assert second["settled_step_s"] == 2.5
    assert second["new_plans"][0] == {
        "step": 7,
        "steps_after_change": 2,
        "windows": [8, 1],
        "num_microbatches": 32,
        "why": "step 6: window 3,1 -> 8,1",
    }
    assert second["ideal_s"] == pytest.approx(first["ideal_s"] + 0.28)
    assert (third["num_steps"], third["step_s"], third["windows"]) == (0, None, None)
    text = "\n".join(phase_lines(rows))
    assert "from step 7 (2 after the change): windows 8,1, 32 microbatches" in text
    assert "give more --steps" in text
