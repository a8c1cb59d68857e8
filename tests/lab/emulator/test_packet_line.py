"""One direction of the lab's link, with literal times."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.lab.emulator.packet_line import PacketLine
from geotrain.lab.emulator.segments import shape_of
from geotrain.lab.settings import LinkSettings
from tests.lab.emulator.packets import packet, segments_of

MBIT = 1e6 / 8
FULL = packet(1448)
"""A segment of 1500 bytes with its headers."""


def line(**settings) -> PacketLine:
    return PacketLine(LinkSettings(**settings), random.Random(7))


def test_a_packet_takes_its_time_at_the_rate_and_then_the_delay():
    wan = line(delay_s=0.05, rate_bytes_per_s=1448e3)  # a full segment takes 1 ms
    wan.push(FULL, now=10.0)
    wan.push(FULL, now=10.0)
    assert wan.next_due() == pytest.approx(10.051)
    assert wan.pop_due(now=10.0505) == []
    assert wan.pop_due(now=10.0515) == [FULL]
    assert wan.next_due() == pytest.approx(10.052)
    assert wan.pop_due(now=11.0) == [FULL]
    assert wan.held_bytes == 0


def test_an_offloaded_packet_takes_as_long_as_its_segments():
    whole, single = line(rate_bytes_per_s=10 * MBIT), line(rate_bytes_per_s=10 * MBIT)
    whole.push(packet(10 * 1448), now=0.0)
    for _ in range(10):
        single.push(FULL, now=0.0)
    single.pop_due(now=0.01)
    last = max(due for due, _ in single._line)
    assert whole.next_due() == pytest.approx(last)


def test_an_idle_line_saves_up_no_rate():
    wan = line(rate_bytes_per_s=1448e3)
    wan.push(FULL, now=0.0)
    wan.push(FULL, now=5.0)
    wan.pop_due(now=4.0)
    assert wan.next_due() == pytest.approx(5.001)


def test_the_tail_of_a_full_queue_is_dropped():
    wan = line(rate_bytes_per_s=1448e3, queue_s=0.0105)
    for _ in range(20):
        wan.push(FULL, now=0.0)
    assert len(wan.pop_due(now=1.0)) == 11  # one served, ten that wait
    assert wan.num_dropped == 9


def test_of_an_offloaded_packet_the_segments_that_find_room_are_kept():
    wan = line(rate_bytes_per_s=1448e3, queue_s=0.0105)
    wan.push(packet(20 * 1448), now=0.0)
    (kept,) = wan.pop_due(now=1.0)
    assert [part.payload for part in segments_of(kept)] == [
        part.payload for part in segments_of(packet(20 * 1448))
    ][:11]
    assert wan.num_dropped == 9


def test_a_queue_in_bytes_holds_that_much():
    wan = line(rate_bytes_per_s=50 * MBIT, queue_s=9.0, queue_bytes=6000)
    for _ in range(20):
        wan.push(FULL, now=0.0)
    assert len(wan.pop_due(now=1.0)) == 5


def test_loss_takes_single_segments():
    wan = line(loss=0.001)
    burst = packet(45 * 1448)
    for index in range(2000):
        wan.push(burst, now=float(index))
    left = sum(shape_of(kept).num_segments for kept in wan.pop_due(now=1e4))
    assert left + wan.num_lost == wan.num_segments == 90_000
    assert 60 < wan.num_lost < 120


def test_order_is_kept_when_the_delay_falls_and_under_jitter():
    wan = line(delay_s=1.0)
    first, second = packet(10, sequence=1), packet(10, sequence=2)
    wan.push(first, now=0.0)
    wan.change(LinkSettings())
    wan.push(second, now=0.1)
    assert wan.pop_due(now=0.9) == []
    assert wan.pop_due(now=1.0) == [first, second]


@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(1, 20_000)), max_size=40))
def test_whatever_comes_leaves_in_order_and_no_faster_than_the_rate(arrivals):
    rate = 100 * MBIT
    wan = line(delay_s=0.02, rate_bytes_per_s=rate, jitter_s=0.005, queue_s=5.0)
    now, pushed, left = 0.0, [], []
    for sequence, (pause_s, size) in enumerate(arrivals):
        now += pause_s
        pushed.append(packet(size, sequence=sequence))
        wan.push(pushed[-1], now=now)
    started = now - sum(pause_s for pause_s, _ in arrivals)
    while (due := wan.next_due()) is not None:
        left += wan.pop_due(now=due)
        done = sum(size for _, size in arrivals[: len(left)])
        assert done / rate <= due - started - 0.02 + 1e-9
    assert left == pushed
    assert wan.held_bytes == 0


def test_a_cut_loses_what_comes_and_what_is_under_way():
    wan = line(delay_s=1.0)
    wan.push(FULL, now=0.0)
    wan.change(LinkSettings(delay_s=1.0, cut=True))
    wan.push(FULL, now=0.5)
    assert wan.pop_due(now=9.0) == []
    assert (wan.num_lost, wan.held_bytes) == (2, 0)
    wan.change(LinkSettings())
    wan.push(FULL, now=10.0)
    assert wan.pop_due(now=10.0) == [FULL]


def test_a_silent_connection_is_forgotten():
    wan = line(idle_drop_s=30.0)
    for now in (0.0, 29.0, 60.0):
        wan.push(FULL, now=now)
    assert len(wan.pop_due(now=99.0)) == 2
    assert wan.num_forgotten == 1


def test_the_same_seed_loses_the_same():
    runs = []
    for _ in range(2):
        wan = line(loss=0.1)
        for _ in range(100):
            wan.push(FULL, now=0.0)
        runs.append(wan.num_lost)
    assert runs[0] == runs[1]
