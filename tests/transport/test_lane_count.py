import pytest

from geotrain.transport.lane_count import FIRST_PAUSE_S, LONGEST_PAUSE_S, LaneCount
from geotrain.transport.lives import MAX_BULK_LANES

TICK_S = 0.1


class Line:
    """A link that carries so much with so many lanes; lanes take a while to open."""

    def __init__(self, rate_of, *, rtt_s=0.1, opening_s=0.3, fixed=None) -> None:
        self.count = LaneCount(fixed)
        self.rate_of = rate_of
        self.rtt_s = rtt_s
        self.opening_s = opening_s
        self.num_open = self.count.wanted
        self.now = 0.0
        self.busy, self.is_full, self.is_held_back = True, False, True
        self.tried: list[int] = []
        self._changed = 0.0

    def run(self, seconds: float) -> int:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            if self.now - self._changed >= self.opening_s or self.count.wanted < self.num_open:
                self.num_open = self.count.wanted
            before = self.count.wanted
            self.count.on_interval(
                now=self.now,
                delivered_bytes=int(self.rate_of(self.num_open) * TICK_S),
                elapsed_s=TICK_S,
                busy=self.busy,
                is_full=self.is_full,
                is_held_back=self.is_held_back,
                rtt_s=self.rtt_s,
                num_open=self.num_open,
            )
            if self.count.wanted > before:
                self.tried.append(self.count.wanted)
                self._changed = self.now
        return self.count.wanted


def test_where_each_lane_carries_as_much_as_the_first_all_are_had_within_seconds():
    line = Line(lambda lanes: 1e6 * lanes)
    assert line.run(20.0) == MAX_BULK_LANES
    assert line.tried == [2, 4, 8, 16, 32, 64]


def test_what_gains_too_little_is_taken_back_and_tried_again_ever_more_seldom():
    line = Line(lambda lanes: 1e8)
    assert line.run(6.5) == 1 and line.tried == [2]
    line.run(FIRST_PAUSE_S - 6.0)
    assert line.tried == [2]
    line.run(12.0)
    assert line.tried == [2, 2]
    line.run(1.6 * FIRST_PAUSE_S)
    assert line.tried == [2, 2]
    line.run(10 * LONGEST_PAUSE_S)
    assert line.count.wanted == 1 and len(line.tried) <= 17


def test_it_stops_where_the_line_is_filled():
    line = Line(lambda lanes: min(3e6 * lanes, 20e6))
    assert line.run(25.0) == 8
    assert line.tried == [2, 4, 8, 16]


def test_a_rate_that_falls_has_more_tried_at_once():
    line = Line(lambda lanes: 1e8)
    line.run(7.0)
    line.rate_of = lambda lanes: 1e6 * lanes
    line.run(12.0)
    assert line.count.wanted >= 4


@pytest.mark.parametrize("changes", [{"busy": False}, {"is_full": True}, {"rtt_s": 0.001}])
def test_where_more_cannot_help_none_are_tried(changes):
    line = Line(lambda lanes: 1e6 * lanes)
    for name, value in changes.items():
        setattr(line, name, value)
    assert line.run(60.0) == 1


def test_without_a_sign_that_more_would_help_they_are_tried_later():
    line = Line(lambda lanes: 1e6 * lanes)
    line.is_held_back = False
    line.run(FIRST_PAUSE_S)
    assert line.tried == []
    line.run(20.0)
    assert line.count.wanted >= 16


def test_number_configured_stays():
    line = Line(lambda lanes: 1e6 * lanes, fixed=3)
    assert line.run(60.0) == 3
    assert line.count.reason == "as configured"


def test_lanes_that_never_open_are_given_up():
    line = Line(lambda lanes: 1e6 * lanes, opening_s=1e9)
    assert line.run(12.0) == 1


def test_reason_tells_what_was_compared():
    line = Line(lambda lanes: 1e8)
    line.run(6.5)
    assert line.count.reason == "2 carried 800 Mbit/s, 1 carried 800 Mbit/s"
