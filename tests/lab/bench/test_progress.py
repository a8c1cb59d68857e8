import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.lab.bench.progress import Progress, quantiles_ms


def run(events, *, since=2.0, until=4.0):
    progress = Progress(since=since, until=until)
    for now, nbytes in events:
        progress.on_bytes(nbytes, now=now)
    return progress


def test_what_comes_before_and_what_opens_the_span_do_not_count():
    progress = run([(1.0, 900), (2.5, 900), (3.0, 100), (4.5, 300), (5.0, 900)])
    assert (progress.began_at, progress.ended_at) == (2.5, 4.5)
    assert progress.bytes_per_s == (100 + 300) / 2.0


def test_a_stall_over_the_end_is_counted_to_its_end():
    assert run([(2.0, 1), (3.0, 100), (12.0, 100)]).bytes_per_s == 200 / 10.0


def test_without_an_event_after_the_end_there_is_no_figure():
    assert run([(2.0, 1), (3.9, 100)]).ended_at is None


@given(
    size=st.integers(1, 1 << 20),
    interval_s=st.floats(0.01, 1.5),
    first_s=st.floats(0.0, 1.0),
)
def test_a_steady_flow_has_its_rate_wherever_the_borders_fall(size, interval_s, first_s):
    events = [(first_s + index * interval_s, size) for index in range(int(8 / interval_s))]
    assert run(events).bytes_per_s == pytest.approx(size / interval_s)


def test_quantiles():
    assert quantiles_ms([]) is None
    samples = [index / 1000 for index in range(1, 101)]
    assert quantiles_ms(samples[::-1]) == {"min": 1.0, "p50": 51.0, "p99": 99.0, "count": 100}
