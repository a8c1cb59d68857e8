"""What a schedule must be, and how a wrong one is shown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.lab.bench.schedule import rows as warm_up_rows
from geotrain.pipeline.schedule import Action, parse_row, print_row
from geotrain.pipeline.timed import Trace
from geotrain.pipeline.validate import ScheduleError, grid, validate, validate_trace

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "faulty_schedules.txt"

NAMED = ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]


def check(*texts: str, num_microbatches: int, windows: list[int]) -> None:
    validate(
        [parse_row(text) for text in texts], num_microbatches=num_microbatches, windows=windows
    )


def test_rows_print_and_parse_back():
    for text in NAMED:
        assert print_row(parse_row(text)) == text


def test_1f1b_is_legal_with_and_without_its_messages():
    check("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", num_microbatches=2, windows=[2, 1])
    check(*NAMED, num_microbatches=1, windows=[1, 1])


def test_weight_gradients_may_come_later():
    check("0F0 0F1 0B0 0B1 0W0 0W1", num_microbatches=2, windows=[2])


def faulty() -> dict[str, tuple[list[str], int, list[int]]]:
    """Cases of the golden file: name -> (rows, microbatches, windows)."""
    return {
        "runs twice": (["0F0 0B0 0F0"], 2, [1]),
        "out of order": (["0F1 0F0 0B0 0B1"], 2, [2]),
        "gradients out of order": (["0F0 0F1 0B1 0B0"], 2, [2]),
        "backward before its forward": (["0B0 0F0"], 1, [1]),
        "beyond the window": (["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"], 3, [2, 1]),
        "missing at the end": (["0F0 0F1 0B0"], 2, [2]),
        "a stranger's action": (["0F0 1B0"], 1, [1]),
        "one microbatch too many": (["0F0 0B0 0F1 0B1"], 1, [1]),
        "sent before it is computed": (["0SEND_F0 0F0 0RECV_B0 0B0", NAMED[1]], 1, [1, 1]),
        "nobody to send to": (["0F0 0B0", "1F0 1B0 1SEND_F0"], 1, [1, 1]),
        "received by nobody's sending": (["0RECV_F0 0F0 0B0", "1F0 1B0"], 1, [1, 1]),
        "weights before the backward": (["0F0 0W0 0B0"], 1, [1]),
        "deadlock": (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], 2, [1, 2]),
        "far along": (
            [" ".join(f"0F{m} 0B{m}" for m in [*range(9), 10, 9]), ""],
            11,
            [1, 1],
        ),
    }


def test_what_is_wrong_is_shown_in_the_grid():
    found = []
    for name, (texts, num_microbatches, windows) in faulty().items():
        with pytest.raises(ScheduleError) as caught:
            check(*texts, num_microbatches=num_microbatches, windows=windows)
        found.append(f"# {name}\n{caught.value}\n")
    assert "\n".join(found) == GOLDEN.read_text()


def test_the_error_has_the_place():
    with pytest.raises(ScheduleError) as caught:
        check("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", num_microbatches=2, windows=[2, 1])
    assert (caught.value.stage, caught.value.cell) == (1, 1)


@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_warm_up_schedules_are_legal_and_any_two_actions_swapped_are_not(stages, count, data):
    widths = [min(count, stages - i) for i in range(stages)]
    rows = [[Action.parse(text) for text in row] for row in warm_up_rows(widths, count)]
    validate(rows, num_microbatches=count, windows=widths)
    stage = data.draw(st.integers(0, stages - 1))
    a, b = sorted(data.draw(st.sets(st.integers(0, 2 * count - 1), min_size=2, max_size=2)))
    swapped = [list(row) for row in rows]
    swapped[stage][a], swapped[stage][b] = rows[stage][b], rows[stage][a]
    # A stage's own order may be changed here and there: 1F1B may swap a forward and a backward.
    same_kind = rows[stage][a].kind == rows[stage][b].kind
    if same_kind:
        with pytest.raises(ScheduleError):
            validate(swapped, num_microbatches=count, windows=[count] * stages)


@given(st.integers(0, 3), st.integers(0, 30))
def test_the_grid_marks_one_cell(stage, cell):
    rows = [parse_row(" ".join(f"{s}F{m}" for m in range(20))) for s in range(4)]
    shown = grid(rows, stage=stage, cell=min(cell, 20)).splitlines()
    assert len(shown) == 4
    assert [line.count("[") for line in shown] == [int(s == stage) for s in range(4)]


def test_times_are_checked_as_well():
    good = "0F0 0 1\n1F0 1.5 2\n1B0 2 3\n0B0 3.5 4\n"
    validate_trace(Trace.parse(good), num_microbatches=1, windows=[1, 1])
    for wrong, reason in (
        ("0F0 0 1\n1F0 0.5 2\n1B0 2 3\n0B0 3.5 4\n", "1F0 begins before 0F0 ends"),
        ("0F0 0 1\n1F0 1.5 2\n1B0 1.9 3\n0B0 3.5 4\n", "1B0 begins before the action ahead"),
        ("0F0 0 1\n1F0 1.5 2\n1B0 2 3\n0B0 3.5 3\n", "0B0 ends before it begins"),
    ):
        with pytest.raises(ScheduleError, match=reason):
            validate_trace(Trace.parse(wrong), num_microbatches=1, windows=[1, 1])
