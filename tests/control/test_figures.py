"""What a region reports, and how the two ends of a direction are put together."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.control.figures import MAX_ENTRIES, RECORD, Figures, Hold, Matches, Passage

MICROSECONDS = st.integers(0, 2**31)
PASSAGES = st.lists(
    st.builds(
        Passage,
        st.integers(1, 10**6),
        st.integers(-1, 4095),
        st.integers(-(2**31), 0),
        MICROSECONDS,
    ),
    max_size=MAX_ENTRIES,
).map(tuple)
HOLDS = st.lists(
    st.builds(Hold, st.integers(1, 10**6), st.integers(-1, 4095), MICROSECONDS),
    max_size=MAX_ENTRIES,
).map(tuple)
TIMES = st.lists(MICROSECONDS, max_size=MAX_ENTRIES).map(tuple)

FIGURES = st.builds(
    Figures,
    forward_us=TIMES,
    backward_us=TIMES,
    sent_down=PASSAGES,
    sent_up=PASSAGES,
    held_from_up=HOLDS,
    held_from_down=HOLDS,
    in_flight_limit=st.integers(0, 1000),
    slots_down=st.integers(0, 1000),
    slots_up=st.integers(0, 1000),
)


@given(FIGURES)
def test_figures_cross_the_wire_unchanged(figures):
    packed = msgpack.packb(figures.to_record())
    assert Figures.from_record(msgpack.unpackb(packed)) == figures


def test_a_report_stays_small_however_many_microbatches_there_are():
    many = range(4096)
    figures = Figures(
        forward_us=tuple(20_000 + n for n in many),
        backward_us=tuple(40_000 + n for n in many),
        sent_down=tuple(Passage(70_000, n, -n * 60_000, 300_000) for n in many),
        sent_up=tuple(Passage(70_000, n, -n * 60_000, 300_000) for n in many),
        held_from_up=tuple(Hold(70_000, n, 90_000) for n in many),
        held_from_down=tuple(Hold(70_000, n, 90_000) for n in many),
    )
    record = figures.to_record()
    assert len(msgpack.packb(record)) < 5 * 1024
    assert len(Figures.from_record(record).forward_us) == MAX_ENTRIES


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward_us": None},
        {"forward_us": ["x"]},
        {"forward_us": [1] * (MAX_ENTRIES + 1)},
        {"sent_up": [1, 2, 3]},
        {"held_from_up": [1, 2]},
        {"slots_up": None},
        {"slots_up": -1},
        {"forward_us": [5, -5]},
        {"sent_up": [1, 2, 3, -4]},
        {"held_from_up": [1, 2, -3]},
    ],
)
def test_malformed_figures_are_refused(wrong):
    with pytest.raises(ValueError, match=r"malformed figures|invalid literal"):
        Figures.from_record(Figures().to_record() | wrong)
    with pytest.raises(ValueError, match="malformed figures"):
        Figures.from_record({})


def test_a_trip_is_what_is_left_without_the_time_it_lay_there():
    matches = Matches()
    trips = matches.add([Passage(3, 0, -500_000, 130_000)], [Hold(3, 0, 30_000)], step=3)
    assert [(t.step, t.microbatch, t.sent_s, t.way_s) for t in trips] == [(3, 0, -0.5, 0.1)]


def test_the_ends_may_be_reported_in_different_steps():
    matches = Matches()
    assert matches.add([], [Hold(3, 7, 10_000)], step=3) == []
    assert len(matches.add([Passage(3, 7, 0, 110_000)], [], step=4)) == 1


def test_what_finds_no_counterpart_is_forgotten():
    matches = Matches()
    matches.add([Passage(3, 0, 0, 100_000)], [Hold(3, 1, 0)], step=3)
    matches.add([], [], step=4)
    matches.add([], [], step=5)
    assert matches.add([Passage(3, 1, 0, 100_000)], [Hold(3, 0, 0)], step=5) == []


def test_an_acknowledgement_before_the_arrival_is_no_trip():
    """As after a daemon came back, or where a clock was set."""
    assert Matches().add([Passage(3, 0, 0, 20_000)], [Hold(3, 0, 30_000)], step=3) == []


def test_a_record_is_told_from_a_microbatch():
    trips = Matches().add([Passage(1, RECORD, 0, 90_000)], [Hold(1, RECORD, 80_000)], step=1)
    assert trips[0].microbatch == RECORD
    assert trips[0].way_s == pytest.approx(0.01)
