from random import Random

from geotrain.transport.backoff import FIRST_S, LONGEST_S, Backoff


def test_delays_double_with_jitter_between_first_and_longest():
    backoff = Backoff(Random(1))
    delays = [backoff.next_delay_s() for _ in range(12)]
    expected = [min(FIRST_S * 2**n, LONGEST_S) for n in range(12)]
    for delay, whole in zip(delays, expected, strict=True):
        assert max(FIRST_S, whole / 2) <= delay <= whole
    assert len(set(delays)) > 6


def test_reset_begins_anew():
    backoff = Backoff(Random(1))
    for _ in range(5):
        backoff.next_delay_s()
    backoff.reset()
    assert backoff.next_delay_s() == FIRST_S
