"""Losses and jitter, from a given generator."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.lab.emulator.chance import Jitter, Loss


@pytest.mark.parametrize("probability", [0.001, 0.01, 0.3])
@pytest.mark.parametrize("burst", [1, 45])
def test_the_share_of_losses_is_the_probability(probability, burst):
    loss = Loss(probability, random.Random(3))
    total = 200_000 // burst
    lost = sum(len(loss.among(burst)) for _ in range(total))
    expected = total * burst * probability
    assert abs(lost - expected) < 4 * expected**0.5


def test_certain_and_impossible_losses():
    assert Loss(0.0, random.Random(1)).among(1000) == []
    assert Loss(1.0, random.Random(1)).among(4) == [0, 1, 2, 3]


@given(st.integers(0, 1000), st.lists(st.integers(1, 60), max_size=30), st.floats(0, 1))
def test_losses_do_not_depend_on_how_segments_are_packed(seed, sizes, probability):
    packed, single = (Loss(probability, random.Random(seed)) for _ in range(2))
    positions, start = [], 0
    for size in sizes:
        positions += [start + index for index in packed.among(size)]
        start += size
    assert positions == [index for index in range(start) if single.among(1)]


def test_a_new_probability_holds_from_the_next_segment_on():
    loss = Loss(0.0, random.Random(1))
    loss.among(10)
    loss.change(1.0)
    assert loss.among(2) == [0, 1]
    loss.change(0.0)
    assert loss.among(10_000) == []


def test_jitter_is_never_negative_and_has_the_deviation_asked_for():
    jitter = Jitter(0.002, random.Random(5))
    extras = [jitter.at(float(second)) for second in range(4000)]
    assert min(extras) >= 0.0
    assert (sum(extra**2 for extra in extras) / 4000) ** 0.5 == pytest.approx(0.002, rel=0.05)


def test_packets_close_together_share_one_draw():
    jitter = Jitter(0.010, random.Random(5))
    assert len({jitter.at(now / 1000) for now in range(10)}) == 1
    assert len({jitter.at(now / 1000) for now in range(10, 50)}) >= 3


def test_no_jitter_draws_nothing():
    generator = random.Random(5)
    before = generator.getstate()
    assert Jitter(0.0, generator).at(1.0) == 0.0
    assert generator.getstate() == before
