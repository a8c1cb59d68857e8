"""Two lanes take turns, so that BBR's probe never meets the one that carries.

The kernel's rule (bbr_update_min_rtt of net/ipv4/tcp_bbr.c) is `Bbr` below.
"""

import random

import pytest

from geotrain.transport.carrier import BbrState, KernelCounts
from geotrain.transport.turns import (
    EARLY_S,
    EXPIRES_S,
    LATE_S,
    LATER_S,
    MARGIN_S,
    WARM_BYTES,
    Turns,
)

TICK_S = 0.1


def told(
    min_rtt_us: int = 100_000,
    *,
    is_probed: bool = False,
    is_idle: bool = True,
    acked_bytes: int = WARM_BYTES,
    rate_bytes_s: int = 10_000_000,
) -> KernelCounts:
    bbr = BbrState(
        min_rtt_us=min_rtt_us, is_probed=is_probed, is_idle=is_idle, rate_bytes_s=rate_bytes_s
    )
    return KernelCounts(
        acked_bytes=acked_bytes, retransmitted_bytes=0, limited_s=0.0, rtt_s=0.1, bbr=bbr
    )


def two(**of_second: bool) -> dict[int, KernelCounts]:
    return {1: told(), 2: told(**of_second)}


def turning(*, rested_since: float) -> Turns:
    """Lane 1 carries from 0.0 on; of lane 2 BBR has met no shorter round trip since."""
    turns = Turns()
    turns.on_counts({1: told(99_000), 2: told()}, now=rested_since)
    turns.on_counts(two(), now=max(rested_since, 0.0))
    assert turns.carrying == 1
    return turns


def test_all_lanes_carry_until_each_has_carried_some():
    turns = Turns()
    turns.on_counts({1: told(), 2: told(acked_bytes=WARM_BYTES - 1)}, now=0.0)
    assert turns.carrying is None and turns.may_carry(1) and turns.may_carry(2)
    turns.on_counts(two(), now=0.1)
    assert turns.carrying is not None
    assert [turns.may_carry(number) for number in (1, 2)].count(True) == 1


@pytest.mark.parametrize("slower", [1, 2])
def test_both_carry_until_each_has_found_its_rate_once(slower):
    turns = Turns()
    cold = {slower: told(rate_bytes_s=2_900_000), 3 - slower: told()}
    for now in (0.0, 1.0, 50.0):
        turns.on_counts(cold, now=now)
        assert turns.carrying is None
    turns.on_counts(cold | {slower: told(rate_bytes_s=3_000_000)}, now=51.0)
    assert turns.carrying is not None
    # At rest it finds none: the other one may well find a higher one meanwhile.
    turns.on_counts(cold, now=52.0)
    assert turns.carrying is not None


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {1: told()},
        {1: told(), 2: told(), 3: told()},
        {
            1: told(),
            2: KernelCounts(acked_bytes=WARM_BYTES, retransmitted_bytes=0, limited_s=0, rtt_s=0.1),
        },
    ],
    ids=["several are needed", "one", "three", "one is not under BBR"],
)
def test_only_two_lanes_under_bbr_take_turns(counts):
    turns = turning(rested_since=0.0)
    turns.on_counts(counts, now=0.1)
    assert turns.carrying is None and not turns.is_due(now=100.0)
    assert all(turns.may_carry(number) for number in (1, 2, 3))


@pytest.mark.parametrize("newer", [1, 2])
def test_the_lane_that_expires_first_rests_first(newer):
    turns = Turns()
    cold = {number: told(101_000, acked_bytes=0) for number in (1, 2)}
    turns.on_counts(cold, now=0.0)
    turns.on_counts(cold | {newer: told(100_000, acked_bytes=0)}, now=1.0)
    turns.on_counts({3 - newer: told(101_000), newer: told(100_000)}, now=2.0)
    assert turns.carrying == newer


def test_lanes_change_places_once_the_rested_one_has_expired():
    turns = turning(rested_since=-4.0)
    expired = EXPIRES_S + MARGIN_S - 4.0
    assert not turns.turn(two(), now=expired - 0.01)
    assert turns.turn(two(), now=expired)
    assert turns.carrying == 2
    # Its first acknowledgement renews it; the kernel is believed before that is seen.
    assert not turns.turn(two(), now=expired + 0.1)


def test_a_lane_carries_for_some_time_at_least():
    turns = turning(rested_since=-20.0)
    assert not turns.turn(two(), now=EARLY_S - 0.01)
    assert turns.turn(two(), now=EARLY_S)


def test_a_shorter_round_trip_renews_the_lane_that_carries():
    turns = turning(rested_since=-20.0)
    turns.on_counts({1: told(98_000), 2: told()}, now=3.0)
    assert not turns.turn({1: told(98_000), 2: told()}, now=3.0 + EARLY_S - 0.01)
    assert turns.turn({1: told(98_000), 2: told()}, now=3.0 + EARLY_S)


def test_a_lane_with_a_ping_under_way_does_not_take_over():
    turns = turning(rested_since=-20.0)
    assert not turns.turn(two(is_idle=False), now=8.0)
    assert turns.turn(two(is_idle=True), now=8.1)


def test_a_lane_renewed_while_it_rested_takes_over_late():
    turns = turning(rested_since=-20.0)
    renewed = {1: told(), 2: told(100_001, is_idle=False)}
    turns.on_counts(renewed, now=4.0)
    assert not turns.turn(renewed, now=LATE_S - 0.01)
    assert turns.turn(renewed, now=LATE_S)


@pytest.mark.parametrize(("later_s", "takes_over"), [(LATER_S - 0.01, False), (LATER_S, True)])
def test_a_lane_takes_over_only_if_it_outlasts_the_other_ones_rest(later_s, takes_over):
    turns = turning(rested_since=-20.0)
    renewed = {1: told(), 2: told(100_001)}
    turns.on_counts(renewed, now=later_s)
    assert turns.turn(renewed, now=LATE_S) is takes_over


def test_a_lane_that_is_about_to_expire_does_not_take_over():
    turns = turning(rested_since=-1.0)
    probed = {1: told(is_probed=True), 2: told()}
    assert not turns.turn(probed, now=LATE_S - 1.0)
    assert turns.turn(probed, now=EXPIRES_S + MARGIN_S - 1.0)


def test_a_probe_ends_the_turn_of_the_lane_that_carries():
    turns = turning(rested_since=-20.0)
    assert turns.turn({1: told(is_probed=True), 2: told()}, now=1.0)


def test_a_probed_lane_does_not_take_over():
    turns = turning(rested_since=-20.0)
    assert not turns.turn(two(is_probed=True), now=9.0)


def test_a_probe_renews_even_if_it_finds_the_same_round_trip():
    turns = turning(rested_since=-20.0)
    turns.on_counts(two(is_probed=True), now=2.0)
    turns.on_counts(two(), now=2.1)
    assert not turns.turn(two(), now=2.0 + LATE_S - 3.0)
    assert turns.turn(two(), now=LATE_S)


def test_all_carry_when_a_lane_is_gone():
    turns = turning(rested_since=-20.0)
    turns.stop()
    assert turns.may_carry(1) and turns.may_carry(2)


class Bbr:
    """What Linux's BBR does with an acknowledgement, as far as PROBE_RTT goes."""

    def __init__(self, rng: random.Random, now: float) -> None:
        self._rng = rng
        self.min_rtt_us = self._rtt_us()
        self._noted_s = now
        self._probed_until_s = -1.0
        self._last_sent_s = now - 1.0
        self._restarts = False
        self.num_probes = 0
        self.acked_bytes = WARM_BYTES

    def state(self, now: float) -> KernelCounts:
        return told(
            self.min_rtt_us,
            is_probed=now < self._probed_until_s,
            is_idle=now > self._last_sent_s + 0.1,
        )

    def send(self, now: float, *, is_ping: bool = False) -> None:
        """And its acknowledgement, 0.1 s later."""
        self._restarts = now > self._last_sent_s + 0.1
        self._last_sent_s = now
        rtt_us, at = self._rtt_us(), now + 0.1
        has_expired = at - self._noted_s > EXPIRES_S
        if rtt_us < self.min_rtt_us or (has_expired and not is_ping):
            self.min_rtt_us, self._noted_s = rtt_us, at
        if has_expired and not self._restarts and at > self._probed_until_s:
            self.num_probes += 1
            self._probed_until_s = at + 0.3
            self._noted_s = self._probed_until_s

    def _rtt_us(self) -> int:
        return 100_000 + int(self._rng.expovariate(1 / 200))


def run(seed: int, *, turns: Turns | None, seconds: float = 600.0) -> int:
    """A training of bursts with pauses; how many probes a lane that carried has met after 20 s."""
    rng = random.Random(seed)
    lanes = {number: Bbr(rng, 0.0) for number in (1, 2)}
    next_ping = {number: rng.random() for number in lanes}
    met, tick = 0, 0
    while (now := tick * TICK_S) < seconds:
        tick += 1
        counts = {number: lane.state(now) for number, lane in lanes.items()}
        if turns is not None:
            turns.on_counts(counts, now=now)
        pauses = now % 2.3 > 2.1
        if not pauses:
            if turns is not None:
                turns.turn(counts, now=now)
            number = 1 if turns is None or turns.carrying is None else turns.carrying
            before = lanes[number].num_probes
            lanes[number].send(now + 0.01)
            met += now > 20 and lanes[number].num_probes > before
        for number, lane in lanes.items():
            if now >= next_ping[number]:
                rests = turns is not None and not turns.may_carry(number)
                next_ping[number] = now + (5.0 if rests else 1.0)
                lane.send(now + 0.02, is_ping=True)
    return met


def test_by_the_kernels_rule_hardly_a_lane_is_probed_while_it_carries():
    seeds = range(4)
    without = sum(run(seed, turns=None, seconds=300.0) for seed in seeds)
    with_turns = sum(run(seed, turns=Turns(), seconds=300.0) for seed in seeds)
    assert without >= 40
    assert with_turns <= 1
