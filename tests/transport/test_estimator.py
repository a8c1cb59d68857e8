import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.transport.estimator import (
    FIRST_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    RTT_SAMPLES,
    UNSENT_S,
    RateEstimator,
    RttEstimator,
    chunk_bytes,
    unsent_bytes,
)
from geotrain.transport.frame import MAX_CHUNK_BYTES


def test_rtt_keeps_the_least_ever_and_quantiles_of_the_recent():
    rtt = RttEstimator()
    assert rtt.summary() == {"min": None, "p50": None, "p99": None, "last": None}
    rtt.on_sample(0.010)
    for _ in range(RTT_SAMPLES):
        rtt.on_sample(0.100)
    rtt.on_sample(0.300)
    assert rtt.summary() == {"min": 0.010, "p50": 0.100, "p99": 0.100, "last": 0.300}
    assert rtt.quantile_s(1.0) == 0.300


def test_rate_is_of_the_time_in_which_bytes_flow():
    rate = RateEstimator(idle_s=0.25, sample_s=0.05)
    for burst in range(3):
        for tick in range(11):
            rate.on_bytes(1000, now=burst * 100.0 + tick * 0.01)
        rate.end_burst()
    assert rate.rate_bytes_per_s == pytest.approx(100_000)


def test_rate_of_too_short_a_burst_is_not_believed():
    rate = RateEstimator()
    rate.on_bytes(10**9, now=0.0)
    rate.on_bytes(10**9, now=0.001)
    assert rate.rate_bytes_per_s is None


def test_chunk_lasts_five_milliseconds_within_its_limits():
    assert chunk_bytes(None) == FIRST_CHUNK_BYTES
    assert chunk_bytes(1e3) == 16 * 1024
    assert chunk_bytes(125e6) == 622_592  # 1 Gbit/s: 5 ms, in whole 4 KiB
    assert chunk_bytes(1e10) == 1 << 20


@given(rate=st.none() | st.floats(0, 1e12))
def test_what_waits_in_the_kernel_follows_the_rate_within_bounds(rate):
    assert MIN_CHUNK_BYTES <= unsent_bytes(rate) <= MAX_CHUNK_BYTES
    if rate is not None and 1e7 < rate < 1e8:
        assert unsent_bytes(rate) == int(rate * UNSENT_S)
