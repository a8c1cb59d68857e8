"""From measurements to costs: times that were put in must come out again."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.control.costs import (
    DirectionCosts,
    direction_costs,
    fit_line,
    quantile,
    round_trip_s,
)
from geotrain.control.figures import RECORD, Trip
from geotrain.pipeline.simulate import Delivery
from tests.pipeline.lines import equal_stages, run


def trips_of(deliveries: list[Delivery], *, back_s: float, step: int = 1) -> list[Trip]:
    return [
        Trip(step=step, microbatch=m, sent_s=d.sent_s, way_s=d.arrived_s - d.sent_s + back_s)
        for m, d in enumerate(deliveries)
    ]


OPENING = Trip(step=1, microbatch=RECORD, sent_s=-0.1, way_s=0.1)


def test_a_simulated_links_latency_and_transfer_are_found_again():
    step = run(equal_stages(2, one_way_s=0.05), (4, 1))
    trips = [OPENING, *trips_of(list(step.forward[0]), back_s=0.05)]
    rtt_s = round_trip_s(trips)
    assert rtt_s == pytest.approx(0.1)
    costs = direction_costs(trips, rtt_s=rtt_s)
    assert costs.latency_s == pytest.approx(0.05)
    assert costs.transfer_s == pytest.approx(2**20 / 125e6)
    assert max(costs.jitter_s) == pytest.approx(0.0, abs=1e-9)
    assert costs.delivery_s == pytest.approx(0.05 + 2**20 / 125e6)


def test_tensors_that_queue_for_a_slow_link_are_no_late_deliveries():
    deliveries, free_s = [], 0.0
    for microbatch in range(16):
        sent_s = 0.02 * microbatch
        free_s = max(free_s, sent_s) + 0.05
        deliveries.append(Delivery(sent_s, free_s, free_s + 0.1))
    costs = direction_costs(trips_of(deliveries, back_s=0.1), rtt_s=0.2)
    assert costs.transfer_s == pytest.approx(0.05)
    assert costs.delivery_s == pytest.approx(0.15)


def test_a_link_that_was_flooded_at_first_is_not_taken_for_a_slow_one():
    """Sixteen at once, of which the first were slow to start: the rest arrive 8 ms apart."""
    arrived_s = [0.1 + 0.05 * min(m, 8) + 0.008 * max(0, m - 8) for m in range(24)]
    trips = [
        Trip(step=1, microbatch=m, sent_s=0.0, way_s=arrived_s[m] + 0.05) for m in range(8, 24)
    ]
    costs = direction_costs(trips, rtt_s=0.1)
    assert costs.transfer_s == pytest.approx(0.008)
    assert costs.delivery_s == pytest.approx(0.05 + 0.008, abs=1e-6)


def test_a_delay_that_all_share_is_no_queue():
    """Two workers that take 100 ms for each, at both ends: sent every 60 ms, they arrive so too."""
    rng = Random(1)
    trips = [
        Trip(step=1, microbatch=m, sent_s=0.06 * m, way_s=0.1 + 0.1 + rng.uniform(0.0, 0.012))
        for m in range(32)
    ]
    assert direction_costs(trips, rtt_s=0.1).delivery_s >= 0.05 + 0.1 - 1e-9


def test_the_queue_of_a_busy_link_is_no_lateness_however_long_it_has_become():
    """What each takes drifts from 84 to 115 ms; the last has waited seconds, 31 ms are late."""
    arrived_s, trips = 0.05, []
    for m in range(32):
        arrived_s += 0.084 + 0.001 * m
        sent_s = 0.02 * m
        trips.append(Trip(step=1, microbatch=m, sent_s=sent_s, way_s=arrived_s - sent_s + 0.05))
    costs = direction_costs(trips, rtt_s=0.1)
    assert costs.transfer_s == pytest.approx(0.1, abs=0.001)
    assert costs.delivery_s == pytest.approx(0.05 + 0.114, abs=0.002)


def test_a_busy_link_is_as_slow_as_it_is_when_busy():
    """The first goes at once; behind it each takes longer than it would alone."""
    arrived_s = [0.05 + 0.084 + 0.095 * m for m in range(32)]
    trips = [
        Trip(step=1, microbatch=m, sent_s=0.06 * m, way_s=arrived_s[m] - 0.06 * m + 0.05)
        for m in range(32)
    ]
    costs = direction_costs(trips, rtt_s=0.1)
    assert costs.transfer_s == pytest.approx(0.095)
    assert costs.delivery_s == pytest.approx(0.05 + 0.095)


def test_jitter_is_told_apart_and_a_high_quantile_of_it_counts():
    rng = Random(3)
    late = [rng.choice([0.0, 0.0, 0.0, 0.04]) for _ in range(200)]
    trips = [
        Trip(step=1, microbatch=m, sent_s=m * 1.0, way_s=0.1 + 0.01 + extra)
        for m, extra in enumerate(late)
    ]
    costs = direction_costs(trips, rtt_s=0.1)
    assert costs.delivery_s == pytest.approx(0.05 + 0.01 + 0.04)
    assert sum(costs.jitter_s) == pytest.approx(sum(late))


def test_each_step_begins_with_an_idle_link():
    trips = [Trip(step=step, microbatch=0, sent_s=-float(step), way_s=0.3) for step in (1, 2, 3)]
    assert max(direction_costs(trips, rtt_s=0.1).jitter_s) == pytest.approx(0.0)


def test_nothing_is_known_without_a_tensor():
    assert direction_costs([OPENING], rtt_s=0.1) is None
    assert round_trip_s([], []) is None
    assert round_trip_s([OPENING], [OPENING._replace(way_s=0.05)]) == 0.05


@given(
    overhead_ms=st.integers(0, 50),
    slope_ms=st.integers(0, 50),
    sizes=st.sets(st.integers(1, 64), min_size=2, max_size=6),
)
def test_a_line_is_found_again(overhead_ms, slope_ms, sizes):
    fit = fit_line([(n, (overhead_ms + slope_ms * n) / 1e3) for n in sorted(sizes)])
    assert fit.at(10) == pytest.approx((overhead_ms + slope_ms * 10) / 1e3, abs=1e-9)


def test_one_size_only_is_all_slope_and_neither_part_is_negative():
    assert fit_line([(4, 0.1), (4, 0.1)]).at(8) == pytest.approx(0.2)
    falling = fit_line([(1, 0.2), (4, 0.1)])
    assert (falling.slope_s, falling.overhead_s) == (0.0, pytest.approx(0.12))
    steep = fit_line([(2, 0.1), (4, 0.4)])
    assert steep.overhead_s == 0.0
    assert steep.slope_s > 0


def test_a_quantile_is_one_of_the_values():
    assert [quantile([3.0, 1.0, 2.0], q) for q in (0.0, 0.5, 0.9, 1.0)] == [1.0, 2.0, 3.0, 3.0]
    assert DirectionCosts(latency_s=0.1, transfer_s=0.2).delivery_s == pytest.approx(0.3)
