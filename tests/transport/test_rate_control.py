"""What the estimators decide reaches the kernel, and is taken back when it no longer holds."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from geotrain.transport.carrier import KernelCounts
from geotrain.transport.estimator import RttEstimator
from geotrain.transport.rate_control import RateControl
from geotrain.transport.transitions import LinkSettings


class Carrier:
    """Remembers at which pace it was told to send."""

    def __init__(self) -> None:
        self.paces = []
        self.acked_bytes = 0

    def expect_rate(self, rate_bytes_per_s):
        pass

    def pace(self, rate_bytes_per_s):
        self.paces.append(rate_bytes_per_s)

    def counts(self):
        self.acked_bytes += 1_000_000
        return KernelCounts(
            acked_bytes=self.acked_bytes, retransmitted_bytes=0, limited_s=0.0, rtt_s=0.0
        )


class Feed:
    ran_dry = has_any = True

    def take_ran_dry(self):
        return False


def lane():
    sent = SimpleNamespace(rate_bytes_per_s=None)
    pings = SimpleNamespace(oldest_s=None, interval_s=1.0)
    protocol = SimpleNamespace(carries_chunks=True, pings=pings)
    return SimpleNamespace(
        carrier=Carrier(), protocol=protocol, sent=sent, bytes_sent=0, set_timer=lambda: None
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
