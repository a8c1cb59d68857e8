"""The shaper's rules, with literal times."""

import math
import random

import pytest

from geotrain.lab.emulator.shaper import Shaper, Wire
from geotrain.lab.settings import LinkSettings


def shaper(
    *, rtt_s: float = 0.0, rate: float | None = None, wire: Wire | None = None, **others
) -> Shaper:
    settings = LinkSettings.from_round_trip(rtt_s, rate_bytes_per_s=rate, **others)
    return Shaper(settings, random.Random(7), wire or Wire())


def leaving(line: Shaper, now: float) -> bytes:
    return b"".join(bytes(segment) for segment in line.pop_due(now=now) if segment is not None)


def test_a_byte_leaves_after_half_the_round_trip():
    line = shaper(rtt_s=0.1)
    line.push(b"x", now=7.0)
    assert leaving(line, 7.049) == b""
    assert line.next_due() == pytest.approx(7.05)
    assert leaving(line, 7.0501) == b"x"
    assert line.next_due() is None


def test_bytes_are_serialised_at_the_rate():
    line = shaper(rate=1e6)
    line.push(bytes(100_000), now=0.0)
    assert len(leaving(line, 0.05)) == pytest.approx(50_000, abs=1_500)
    assert len(leaving(line, 0.1001)) == pytest.approx(50_000, abs=1_500)
    assert line.held_bytes == 0


def test_an_idle_line_saves_up_no_rate():
    line = shaper(rate=1e6)
    line.push(bytes(1_000), now=0.0)
    line.push(bytes(1_000), now=5.0)
    assert len(leaving(line, 5.0005)) == 1_000
    assert line.next_due() == pytest.approx(5.001)


def test_a_busy_line_delays_what_follows():
    line = shaper(rate=1e6, rtt_s=0.2)
    line.push(bytes(10_000), now=0.0)
    line.push(b"y", now=0.001)
    leaving(line, 0.1100005)
    assert line.next_due() == pytest.approx(0.110001)


def test_bytes_keep_their_order_when_the_delay_falls():
    line = shaper(rtt_s=1.0)
    line.push(b"first", now=0.0)
    line.change(LinkSettings())
    line.push(b"second", now=0.1)
    assert leaving(line, 0.2) == b""
    assert leaving(line, 0.5) == b"firstsecond"


def test_a_new_rate_holds_for_what_comes_after():
    line = shaper(rate=1e6)
    line.push(bytes(1_000), now=0.0)
    line.change(LinkSettings(rate_bytes_per_s=1e3))
    line.push(bytes(1_000), now=0.0)
    assert len(leaving(line, 0.5)) == 1_000
    assert line.next_due() == pytest.approx(1.001)


def test_the_sender_waits_while_the_queue_is_full():
    line = shaper(rtt_s=0.2, rate=10e6, queue_s=0.1)  # 1 MB queued
    line.push(bytes(999_000), now=0.0)
    assert line.full_until(now=0.0) is None
    line.push(bytes(11_000), now=0.0)
    assert line.full_until(now=0.0) == pytest.approx(0.001)
    assert line.full_until(now=0.0011) is None


def test_a_queue_in_bytes_replaces_the_time():
    line = shaper(rate=10e6, queue_s=9.0, queue_bytes=1_000_000)
    line.push(bytes(1_010_000), now=0.0)
    assert line.full_until(now=0.0) == pytest.approx(0.001)


def test_the_sender_waits_for_one_who_does_not_read():
    line = shaper(rtt_s=0.2, rate=10e6, queue_s=0.1)
    for second in range(5):
        line.push(bytes(500_000), now=float(second))
    assert line.full_until(now=9.0) == math.inf
    leaving(line, 9.0)
    assert line.full_until(now=9.0) is None


def test_connections_share_the_rate_of_their_wire():
    wire = Wire()
    one, other = shaper(rate=1e6, wire=wire), shaper(rate=1e6, wire=wire)
    one.push(bytes(10_000), now=0.0)
    other.push(b"y", now=0.0)
    assert other.next_due() == pytest.approx(0.010001)
    one.push(bytes(1_000), now=0.0)
    leaving(one, 0.0105)
    assert one.next_due() == pytest.approx(0.011001)


def test_a_slow_link_still_takes_what_one_read_gives():
    line = shaper(rate=1e3)
    line.push(bytes(200_000), now=0.0)
    assert line.full_until(now=0.0) is None


def test_a_lost_segment_costs_one_round_trip_and_what_follows_waits():
    line = shaper(rtt_s=0.1, loss=1.0)
    line.push(b"x", now=0.0)
    line.change(LinkSettings.from_round_trip(0.1))
    line.push(b"y", now=0.0)
    assert leaving(line, 0.149) == b""
    assert leaving(line, 0.151) == b"xy"


def test_jitter_delays_and_keeps_the_order():
    line = shaper(rtt_s=0.1, jitter_s=0.01)
    for number in range(100):
        line.push(bytes([number]), now=number / 1000)
    assert leaving(line, 0.05) in (b"", b"\0")
    assert leaving(line, 9.0)[-1] == 99


def test_a_connection_that_was_silent_is_forgotten():
    line = shaper(idle_drop_s=60.0)
    line.push(b"a", now=0.0)
    line.push(b"b", now=59.0)
    assert not line.forgotten
    line.push(b"c", now=120.0)
    line.push(b"d", now=121.0)
    line.push_end(now=122.0)
    assert line.forgotten
    assert line.pop_due(now=999.0) == [b"a", b"b"]


def test_the_end_follows_the_last_byte():
    line = shaper(rate=1e6, rtt_s=0.1)
    line.push(b"abc", now=0.0)
    line.push_end(now=0.0)
    assert line.pop_due(now=0.04) == []
    assert line.pop_due(now=0.06) == [b"abc", None]
