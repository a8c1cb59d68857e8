"""What the estimators decide reaches the kernel, and is taken back when it no longer holds."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from geotrain.transport.carrier import BbrState, KernelCounts
from geotrain.transport.estimator import RttEstimator
from geotrain.transport.rate_control import RateControl
from geotrain.transport.transitions import LinkSettings
from geotrain.transport.turns import REST_PINGS


class Carrier:
    """Remembers at which pace it was told to send."""

    def __init__(self, *, bbr: bool = False) -> None:
        self.paces = []
        self.acked_bytes = 0
        self.rtt_s = 0.0
        self.bbr = (
            BbrState(min_rtt_us=100, is_probed=False, is_idle=True, rate_bytes_s=10_000_000)
            if bbr
            else None
        )

    def expect_rate(self, rate_bytes_per_s):
        pass

    def pace(self, rate_bytes_per_s):
        self.paces.append(rate_bytes_per_s)

    def counts(self):
        self.acked_bytes += 1_000_000
        return KernelCounts(
            acked_bytes=self.acked_bytes,
            retransmitted_bytes=0,
            limited_s=0.0,
            rtt_s=self.rtt_s,
            bbr=self.bbr,
        )


class Feed:
    ran_dry = has_any = True

    def take_ran_dry(self):
        return False


def lane(*, bbr=False):
    sent = SimpleNamespace(rate_bytes_per_s=None)
    pings = SimpleNamespace(oldest_s=None, interval_s=1.0)
    protocol = SimpleNamespace(carries_chunks=True, pings=pings)
    return SimpleNamespace(
        carrier=Carrier(bbr=bbr),
        protocol=protocol,
        sent=sent,
        bytes_sent=0,
        set_timer=lambda: None,
        wake=lambda: None,
    )


@pytest.mark.parametrize("num_lanes", [1, 3])
async def test_a_pace_ends_when_there_is_no_cap_any_more(num_lanes):
    lanes = {number: lane() for number in range(1, num_lanes + 1)}
    control, rtt = lane(), RttEstimator()
    rates = RateControl(
        peer="b",
        settings=LinkSettings(),
        rtt=rtt,
        feed=Feed(),
        lanes=lanes,
        control=lambda: control,
        on_wanted=lambda num: None,
    )
    decided = iter([None, 9e6, 6e6, None, None])
    done = asyncio.Event()

    def on_interval(**measured):
        rates.pacing.cap_bytes_per_s = next(decided, None)
        if rates.pacing.cap_bytes_per_s is None and lanes[1].carrier.paces:
            done.set()
        return rates.pacing.cap_bytes_per_s, "as the test says"

    rates.pacing.on_interval = on_interval
    rates.wake()
    async with asyncio.timeout(30):
        await done.wait()
        while len(lanes[1].carrier.paces) < 3:
            await asyncio.sleep(0)
    rates.stop()
    for each in lanes.values():
        assert each.carrier.paces == [9e6 / num_lanes, 6e6 / num_lanes, math.inf]


async def test_the_lane_that_rests_is_paced_as_if_it_carried_and_its_round_trip_says_nothing():
    lanes = {number: lane(bbr=True) for number in (1, 2)}
    control, told = lane(), []
    rates = RateControl(
        peer="b",
        settings=LinkSettings(),
        rtt=RttEstimator(),
        feed=Feed(),
        lanes=lanes,
        control=lambda: control,
        on_wanted=lambda num: None,
    )
    done = asyncio.Event()

    def on_interval(*, kernel_rtt_s, **measured):
        rates.pacing.cap_bytes_per_s = 9e6
        for number, each in lanes.items():
            each.carrier.rtt_s = 0.2 if number == rates.turns.carrying else 0.1
        told.append(kernel_rtt_s)
        if len(told) == 4:
            done.set()
        return 9e6, "as the test says"

    rates.pacing.on_interval = on_interval
    rates.wake()
    async with asyncio.timeout(30):
        await done.wait()
    resting = 3 - rates.turns.carrying
    rates.stop()
    assert all(each.carrier.paces[-1] == 9e6 for each in lanes.values())
    assert told[-1] == 0.2
    pings = {number: each.protocol.pings.interval_s for number, each in lanes.items()}
    assert pings == {3 - resting: 1.0, resting: 1.0 * REST_PINGS}
    assert rates.turns.may_carry(1) and rates.turns.may_carry(2)


async def test_lanes_change_places_when_the_next_burst_begins():
    lanes = {number: lane(bbr=True) for number in (1, 2)}
    control, feed, woken = lane(), Feed(), []
    for number, each in lanes.items():
        each.wake = lambda number=number: woken.append(number)
    rates = RateControl(
        peer="b",
        settings=LinkSettings(),
        rtt=RttEstimator(),
        feed=feed,
        lanes=lanes,
        control=lambda: control,
        on_wanted=lambda num: None,
    )
    rates.pacing.on_interval = lambda **measured: (None, "as the test says")
    rates.wake()
    async with asyncio.timeout(30):
        while rates.turns.carrying is None:
            await asyncio.sleep(0)
    before = rates.turns.carrying
    lanes[before].carrier.bbr = replace(lanes[before].carrier.bbr, is_probed=True)
    rates.turns.on_counts({n: each.carrier.counts() for n, each in lanes.items()}, now=0.0)
    rates.wake()
    rates.stop()
    assert woken and set(woken) == {1, 2}
