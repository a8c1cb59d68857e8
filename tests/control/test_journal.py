"""The file of plans: written, read back, and asked for the plan of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.control.journal import Entry, Journal

ENTRIES = st.builds(
    Entry,
    step=st.integers(1, 10**6),
    num_microbatches=st.integers(1, 4096),
    windows=st.lists(st.integers(1, 1024), min_size=1, max_size=8).map(tuple),
    why=st.text(max_size=40),
)


def entry(step: int, *windows: int, count: int = 8) -> Entry:
    return Entry(step=step, num_microbatches=count, windows=windows)


@given(ENTRIES)
def test_a_line_reads_back(written):
    line = written.to_line()
    assert line.count("\n") == 1
    assert Entry.from_line(line) == written


def test_a_plan_holds_until_the_next_one():
    text = entry(1, 2, 1).to_line() + "\n" + entry(5, 7, 1, count=16).to_line()
    journal = Journal.parse(text)
    assert [journal.at(step).windows for step in (1, 4, 5, 900)] == [(2, 1), (2, 1), (7, 1), (7, 1)]
    assert journal.at(5).num_microbatches == 16
    assert journal.at(0) is None


def test_a_resumed_run_takes_the_place_of_what_came_after():
    journal = Journal([entry(1, 2, 1), entry(5, 7, 1), entry(9, 8, 1), entry(5, 4, 1)])
    assert [journal.at(step).windows for step in (4, 5, 9)] == [(2, 1), (4, 1), (4, 1)]


@pytest.mark.parametrize(
    "line",
    ["x", "[]", "3", "{}", '{"step": 1, "num_microbatches": 8}',
     '{"step": 0, "num_microbatches": 8, "windows": [1]}',
     '{"step": 1, "num_microbatches": 8, "windows": [0]}',
     '{"step": 1, "num_microbatches": 8, "windows": []}',
     '{"step": 1, "num_microbatches": 8, "windows": 3}'],
)  # fmt: skip
def test_what_is_no_plan_is_named_by_its_line(line):
    with pytest.raises(ValueError, match="line 2: "):
        Journal.parse(entry(1, 2, 1).to_line() + line + "\n")
