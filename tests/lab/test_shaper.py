"""The shaper's rules, with literal times."""

import pytest

from geotrain.lab.shaper import Conditions, Shaper


def shaper(*, rtt_s: float = 0.0, rate: float | None = None, queue_s: float = 0.05) -> Shaper:
    return Shaper(Conditions(rtt_s=rtt_s, rate_bytes_per_s=rate, queue_s=queue_s))


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
    line.change(Conditions(rtt_s=0.0))
    line.push(b"second", now=0.1)
    assert leaving(line, 0.2) == b""
    assert leaving(line, 0.5) == b"firstsecond"


def test_a_new_rate_holds_for_what_comes_after():
    line = shaper(rate=1e6)
    line.push(bytes(1_000), now=0.0)
    line.change(Conditions(rate_bytes_per_s=1e3))
    line.push(bytes(1_000), now=0.0)
    assert len(leaving(line, 0.5)) == 1_000
    assert line.next_due() == pytest.approx(1.001)


def test_the_sender_waits_once_the_path_and_the_queue_are_full():
    line = shaper(rtt_s=0.2, rate=10e6, queue_s=0.1)  # 1 MB travelling, 1 MB queued
    line.push(bytes(1_999_999), now=0.0)
    assert not line.full
    line.push(b"x", now=0.0)
    assert line.full
    leaving(line, 0.1011)
    assert not line.full


def test_a_slow_link_still_takes_what_one_read_gives():
    line = shaper(rate=1e3)
    line.push(bytes(200_000), now=0.0)
    assert not line.full


def test_the_end_follows_the_last_byte():
    line = shaper(rate=1e6, rtt_s=0.1)
    line.push(b"abc", now=0.0)
    line.push_end(now=0.0)
    assert line.pop_due(now=0.04) == []
    assert line.pop_due(now=0.06) == [b"abc", None]


@pytest.mark.parametrize(
    "wrong", [{"rtt_s": -1.0}, {"queue_s": -0.1}, {"rate_bytes_per_s": 0.0}], ids=str
)
def test_impossible_conditions_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        Conditions(**wrong)
