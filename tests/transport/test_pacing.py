import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.transport.pacing import (
    FIRST_INTERVAL_S,
    FLOOR_BYTES_PER_S,
    LONGEST_INTERVAL_S,
    Pacing,
    shares_of,
)
from tests.transport.simulated_path import Path

MBIT = 1e6 / 8


@pytest.mark.parametrize("mbit", [5, 20, 100, 1000, 5000])
@pytest.mark.parametrize("rtt_s", [0.01, 0.1, 0.25])
@pytest.mark.parametrize("jitter_s", [0.0, 0.005])
def test_rate_is_found_within_seconds_and_held_with_little_queue(mbit, rtt_s, jitter_s):
    path = Path(rate=mbit * MBIT, rtt_s=rtt_s, jitter_s=jitter_s)
    settled_s = 5.0 + 20 * rtt_s
    path.run(settled_s)
    assert path.run(20.0) >= 0.95
    assert path.loaded_delay_s(0.99, since=settled_s) < 0.028 + 6 * jitter_s


@pytest.mark.parametrize("mbit", [20, 100, 1000])
@pytest.mark.parametrize("jitter_s", [0.0, 0.005])
def test_what_drains_out_of_the_first_queue_shows_the_rate_and_no_second_one_is_made(
    mbit, jitter_s
):
    path = Path(rate=mbit * MBIT, rtt_s=0.1, jitter_s=jitter_s)
    path.run(2.5)
    assert path.run(10.0) >= 0.98
    assert path.loaded_delay_s(1.0, since=2.5) < 0.025 + 4 * jitter_s


@pytest.mark.parametrize("seed", range(10))
def test_jitter_does_not_make_it_collapse(seed):
    path = Path(rate=1000 * MBIT, rtt_s=0.1, jitter_s=0.005, seed=seed)
    path.run(3.0)
    for _ in range(20):
        assert path.run(1.0) > 0.8


def test_a_path_without_a_queue_has_no_cap():
    path = Path(rate=1000 * MBIT, rtt_s=0.1, backlog=0.0)
    for _ in range(20):
        path.backlog = 1e6
        path.run(0.3)
    assert {cap for _, cap in path.caps} == {None}


def test_a_faster_path_is_found():
    path = Path(rate=50 * MBIT, rtt_s=0.1)
    path.run(8.0)
    path.rate = 1000 * MBIT
    path.run(8.0)
    assert path.run(5.0) > 0.93


@pytest.mark.parametrize("rate_after", [500, 100, 20])
def test_a_slower_path_loses_its_queue_within_seconds(rate_after):
    path = Path(rate=1000 * MBIT, rtt_s=0.1, queue_limit_s=0.5)
    path.run(8.0)
    path.rate = rate_after * MBIT
    path.run(8.0)
    assert path.run(5.0) > 0.9
    assert path.loaded_delay_s(0.99, since=16.0) < 0.05


def test_a_longer_path_is_accepted_and_the_rate_comes_back():
    path = Path(rate=1000 * MBIT, rtt_s=0.1)
    path.run(8.0)
    path.rtt_s = 0.25
    path.run(8.0)
    assert path.run(5.0) > 0.9


@pytest.mark.parametrize("rtts_s", [(0.02, 0.2), (0.02, 0.3), (0.1, 0.25), (0.005, 0.4)])
@pytest.mark.parametrize("share", [0.05, 0.14, 0.5])
@pytest.mark.parametrize("before_s", [2.0, 10.0, 18.0])
def test_a_path_that_becomes_longer_while_little_is_sent_soon_holds_nothing_back(
    rtts_s, share, before_s
):
    """A pipeline: 1 MiB at a time, which is less than the path carries, before and afterwards."""
    path = Path(rate=1000 * MBIT, rtt_s=rtts_s[0], backlog=0.0)
    every_s = (1 << 20) / (share * path.rate)

    def most_behind(seconds: float) -> float:
        """Bytes that waited to be sent, at most."""
        end, most = path.now + seconds, 0.0
        while path.now < end:
            path.backlog += 1 << 20
            path.run(every_s)
            most = max(most, path.backlog)
        return most

    most_behind(before_s)
    path.rtt_s = rtts_s[1]
    assert most_behind(3.5) < 3.0 * share * path.rate
    assert most_behind(10.0) == 0.0
    cap = path.pacing.cap_bytes_per_s
    assert cap is None or cap > 1.2 * share * path.rate


def test_a_queue_of_others_does_not_starve_us():
    path = Path(rate=500 * MBIT, rtt_s=0.1)
    path.run(5.0)
    path.others_delay_s = 0.15
    path.run(6.0)
    assert path.run(10.0) > 0.85


def test_bursts_go_out_at_the_rate_of_the_path():
    path = Path(rate=1000 * MBIT, rtt_s=0.1, backlog=0.0)
    for _ in range(100):
        path.backlog = 8e6  # 64 ms of the rate, every 200 ms
        path.run(0.2)
    caps = [cap for at, cap in path.caps if at > 10.0 and cap is not None]
    assert all(cap > 0.8 * path.rate for cap in caps)


def test_acknowledgements_that_come_late_do_not_halve_the_rate():
    pacing = Pacing()
    for delivered_bytes, rtt_s in ((10, 0.05), (10, 0.05), (10, 0.08), (4, 0.08)):
        cap, _ = pacing.on_interval(
            rtts_s=[rtt_s] * 4, delivered_bytes=delivered_bytes * 10**5, elapsed_s=0.05, busy=True
        )
    assert cap is not None and cap > 0.85 * 10 * 10**5 / 0.05


def test_a_cap_that_short_messages_do_not_need_opens():
    """A pipeline: 1 MiB every 60 ms, which leaves the path idle for a part of the time."""
    path = Path(rate=200 * MBIT, rtt_s=0.05, backlog=0.0)
    path.pacing.cap_bytes_per_s = 0.8 * path.rate
    for _ in range(100):
        path.backlog += 1 << 20
        path.run(0.06)
    assert path.pacing.cap_bytes_per_s > 1.5 * path.rate
    path.backlog = float("inf")
    path.run(5.0)
    assert path.run(5.0) > 0.9
    assert path.loaded_delay_s(0.99, since=path.now - 5.0) < 0.03


def test_one_interval_of_delay_is_not_acted_on():
    pacing = Pacing()
    for _ in range(10):
        pacing.on_interval(rtts_s=[0.1] * 4, delivered_bytes=10**7, elapsed_s=0.1, busy=True)
    cap, _ = pacing.on_interval(rtts_s=[0.12] * 4, delivered_bytes=10**7, elapsed_s=0.1, busy=True)
    assert cap is None


def test_pings_that_are_late_where_the_kernels_are_not_show_a_busy_machine_and_no_queue():
    pacing = Pacing()
    for interval in range(100):
        cap, _ = pacing.on_interval(
            rtts_s=[0.1 if interval < 10 else 0.2] * 4,
            delivered_bytes=10**7,
            elapsed_s=0.1,
            busy=True,
            kernel_rtt_s=0.101,
        )
    assert cap is None


def test_a_queue_in_the_other_direction_is_the_peers():
    pacing = Pacing()
    for interval in range(100):
        cap, _ = pacing.on_interval(
            rtts_s=[0.1 if interval < 10 else 0.25] * 4,
            ways_s=[-7.0] * 4,
            delivered_bytes=10**7,
            elapsed_s=0.1,
            busy=True,
        )
    assert cap is None


def test_clocks_that_run_apart_make_no_queue():
    pacing = Pacing()
    for interval in range(10_000):
        cap, _ = pacing.on_interval(
            rtts_s=[0.1 + 0.05 * (interval % 5 == 4)] * 4,
            ways_s=[5e-5 * 0.1 * interval] * 4,
            delivered_bytes=10**7,
            elapsed_s=0.1,
            busy=True,
        )
    assert cap is None


def test_no_answer_at_all_counts_as_the_time_waited():
    pacing = Pacing()
    for _ in range(10):
        pacing.on_interval(rtts_s=[0.1] * 4, delivered_bytes=10**7, elapsed_s=0.1, busy=True)
    cap, reason = pacing.on_interval(
        rtts_s=[], delivered_bytes=10**7, elapsed_s=0.1, busy=True, waiting_s=0.6
    )
    assert cap is not None and cap < 10**8 and reason == "500 ms of queue"


def test_answers_held_back_for_a_round_trip_by_a_lost_segment_are_no_queue():
    pacing = Pacing()
    for interval in range(100):
        lost = interval % 20 >= 18
        cap, _ = pacing.on_interval(
            rtts_s=[] if lost else [0.1] * 4,
            delivered_bytes=10**7,
            elapsed_s=0.1,
            busy=True,
            waiting_s=0.3 if lost else 0.1,
        )
        assert cap is None


def test_a_start_that_is_still_growing_is_held_but_not_cut():
    pacing = Pacing()
    for interval in range(4):
        cap, _ = pacing.on_interval(
            rtts_s=[0.1 if interval < 3 else 0.12] * 2,
            delivered_bytes=1000 * 2**interval,
            elapsed_s=0.05,
            busy=True,
        )
    assert cap == 1.5 * 8000 / 0.05


def test_shares_follow_the_rates_and_leave_room_to_the_slow():
    assert shares_of([]) == []
    assert shares_of([None, None]) == [0.5, 0.5]
    assert shares_of([30.0, 10.0]) == [0.75, 0.25]
    assert shares_of([50.0, 50.0, None, 0.0]) == [0.5, 0.5, 0.125, 0.125]


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(1e-4, 30.0), max_size=5),
            st.integers(0, 10**10),
            st.floats(0.01, 5.0),
            st.booleans(),
            st.floats(0.0, 30.0),
            st.none() | st.floats(1e-5, 30.0),
        ),
        max_size=80,
    )
)
def test_whatever_is_measured_the_cap_stays_above_its_floor(intervals):
    pacing = Pacing()
    for rtts_s, delivered_bytes, elapsed_s, busy, waiting_s, kernel_rtt_s in intervals:
        cap, reason = pacing.on_interval(
            rtts_s=rtts_s,
            delivered_bytes=delivered_bytes,
            elapsed_s=elapsed_s,
            busy=busy,
            waiting_s=waiting_s,
            kernel_rtt_s=kernel_rtt_s,
        )
        assert cap is None or cap >= FLOOR_BYTES_PER_S
        assert reason
        assert FIRST_INTERVAL_S <= pacing.interval_s <= LONGEST_INTERVAL_S
