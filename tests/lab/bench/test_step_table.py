"""The rows that tests/benchmarks/step_table.py prints."""

import sys

import pytest

from geotrain.commands.bench import parse
from tests.benchmarks import step_table
from tests.benchmarks.step_table import COLUMNS, Cell, cells, command, deadline_s, notes, row, run

CELL = Cell(rtt_ms=100.0, congestion="cubic")
HIDING = {
    "step_s": 2.4,
    "ideal_s": 2.1,
    "lower_bound_s": 2.05,
    "ratio": 2.4 / 2.1,
    "num_steps": 4,
    "num_steps_asked": 4,
    "congestion": {"sites": "cubic", "geotrain": "cubic"},
    "peer_step_s": {"torch_1f1b": 5.9, "torch_gpipe": None, "torch_csv": 2.6},
    "torch_csv_widths": {"4": 2.8, "5": None, "32": 2.6},
    "peer_notes": {"torch_gpipe": "none within 85 s (1 of 4 steps done)"},
    "speedup": 2.6 / 2.4,
    "speedup_stock": 5.9 / 2.4,
    "load": 0.32,
}
CLASSIC = {"step_s": 4.61, "num_steps": 4, "num_steps_asked": 4}


def test_every_link_under_every_congestion_control():
    assert cells([0.0, 200.0], ["cubic", "bbr"], 0.001) == [
        Cell(rtt_ms=0.0, congestion="cubic"),
        Cell(rtt_ms=0.0, congestion="bbr"),
        Cell(rtt_ms=200.0, congestion="cubic"),
        Cell(rtt_ms=200.0, congestion="bbr"),
        Cell(rtt_ms=100.0, congestion="cubic", loss=0.001),
        Cell(rtt_ms=100.0, congestion="bbr", loss=0.001),
    ]
    assert len(cells([0.0], ["bbr"], 0.0)) == 1


@pytest.mark.parametrize("loss", [0.0, 0.001])
@pytest.mark.parametrize("against_torch", [True, False])
def test_the_command_says_what_the_row_says(loss, against_torch):
    cell = Cell(rtt_ms=200.0, congestion="bbr", loss=loss)
    asked = command(cell, window="hide", steps=3, against_torch=against_torch)
    options = parse(asked[asked.index("step") :])
    assert (options.rtt_s, options.loss, options.congestion) == (0.2, loss, "bbr")
    assert (options.window, options.work.steps, options.json) == ("hide", 3, True)
    assert (options.against_torch, options.limit_s) == (against_torch, 200.0 if loss else None)
    ways = 9 if against_torch else 1
    assert deadline_s(options) == ways * (180.0 + options.variant_limit_s)


def test_a_row_has_every_column():
    text = row(CELL, HIDING, CLASSIC)
    assert text == (
        "| 100 ms | cubic | 2.10 | 2.05 | **2.40** | 1.14 | 4.61 | 5.90 | none | 2.60 (32) "
        "| 1.08 | 2.46 | 0.3 |"
    )
    assert text.count("|") == len(COLUMNS) + 1


def test_a_run_that_failed_is_none_in_its_row_and_told_below():
    lossy = Cell(rtt_ms=100.0, congestion="bbr", loss=0.001)
    failed = {"failed": "geotrain: 0 of 4 steps in 150 s"}
    assert row(lossy, failed, CLASSIC).startswith(
        "| 100 ms, 0.1% loss | bbr | none | none | **none** | none | 4.61 | none |"
    )
    early = CLASSIC | {"num_steps": 2}
    assert notes(lossy, failed, early) == [
        "100 ms, 0.1% loss, bbr: geotrain: geotrain: 0 of 4 steps in 150 s",
        "100 ms, 0.1% loss, bbr: geotrain, classic: 2 of 4 steps",
    ]
    assert notes(CELL, HIDING, CLASSIC) == [
        "100 ms, cubic: torch_gpipe: none within 85 s (1 of 4 steps done)"
    ]


def test_another_congestion_control_than_asked_for_is_named():
    other = HIDING | {"congestion": {"sites": "cubic", "geotrain": "bbr"}}
    assert "| cubic, geotrain bbr |" in row(CELL, other, CLASSIC)


def test_a_run_that_ends_badly_or_not_at_all_does_not_end_the_table(monkeypatch):
    program = [sys.executable, "-c", "import sys; sys.exit('no such thing')", "step"]
    assert run(program) == {"failed": "no such thing"}
    monkeypatch.setattr(step_table, "deadline_s", lambda options: 0.5)
    assert run([sys.executable, "-c", "import time; time.sleep(600)", "step"]) == {
        "failed": "nothing within 0.5 s"
    }
