"""What a vote says of when a region did what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.control.timings import MAX_RUNS, Ran, Timings

WHOLE = st.integers(0, 2**40)
RUNS = st.lists(
    st.builds(
        Ran,
        microbatch=st.integers(0, 5000),
        begin_us=WHOLE,
        length_us=WHOLE,
        came_us=st.integers(-(2**40), 2**40),
        size_bytes=WHOLE,
    ),
    max_size=8,
).map(tuple)


@given(RUNS, RUNS, WHOLE)
def test_timings_survive_the_wire(forward, backward, origin_us):
    told = Timings(origin_us=origin_us, loader_us=3, forward=forward, backward=backward)
    assert Timings.from_record(told.to_record()) == told


def test_only_so_many_runs_are_told_of():
    runs = tuple(Ran(m, m, 1, m, 4) for m in range(MAX_RUNS + 5))
    told = Timings.from_record(Timings(forward=runs).to_record())
    assert told.forward == runs[:MAX_RUNS]


@pytest.mark.parametrize(
    "change",
    [
        {"forward": [1, 2, 3]},
        {"forward": [0, 0, -1, 0, 0]},
        {"backward": [0, 0, 1, 0, -4]},
        {"backward": [0] * 5 * (MAX_RUNS + 1)},
        {"origin_us": None},
        {"forward": ["x"] * 5},
    ],
)
def test_what_does_not_add_up_is_refused(change):
    with pytest.raises(ValueError):
        Timings.from_record(Timings().to_record() | change)


def test_what_is_missing_is_refused():
    with pytest.raises(ValueError, match="malformed timings"):
        Timings.from_record({})
