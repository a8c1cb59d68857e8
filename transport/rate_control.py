"""Sees to it that a busy link has its rate: asks the estimators, and does what they say.

It ticks only while there is bulk to send.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from geotrain.transport.carrier import KernelCounts
from geotrain.transport.estimator import RttEstimator
from geotrain.transport.feed import ChunkFeed
from geotrain.transport.lane import Lane
from geotrain.transport.lane_count import LaneCount
from geotrain.transport.pacing import Pacing, shares_of
from geotrain.transport.pings import BUSY_INTERVAL_S
from geotrain.transport.transitions import LinkSettings
from geotrain.transport.turns import REST_PINGS, Turns

logger = logging.getLogger(__name__)

LIMITED = 0.3
"""A lane that a window kept from sending for this part of the time is held back by it."""
IDLE_S = 1.0
"""So long after the last chunk the ticks end."""


@dataclass
class _Told:
    """By the kernels, of all bulk lanes in one interval."""

    delivered_bytes: int = 0
    lost: bool = False
    limited_s: float = 0.0
    """Of the lane that was limited longest."""
    rtt_s: float | None = None
    """Of the lane that delivered soonest."""


_NOTHING = KernelCounts(acked_bytes=0, retransmitted_bytes=0, limited_s=0.0, rtt_s=0.0)


class RateControl:
    """Of one link, for what this side sends."""

    def __init__(
        self,
        *,
        peer: str,
        settings: LinkSettings,
        rtt: RttEstimator,
        feed: ChunkFeed,
        lanes: Mapping[int, Lane],
        control: Callable[[], Lane | None],
        on_wanted: Callable[[int], None],
    ) -> None:
        """
        Args:
            lanes: The open bulk lanes by number, as they are at any time.
            on_wanted: How many bulk lanes would be best has changed.
        """
        self.pacing = Pacing()
        self.count = LaneCount(settings.num_lanes)
        self.turns = Turns()
        self._peer = peer
        self._settings = settings
        self._rtt = rtt
        self._feed = feed
        self._lanes = lanes
        self._control = control
        self._on_wanted = on_wanted
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = self._last_busy = 0.0
        self._seen: dict[int, KernelCounts] = {}
        self._retransmitted_before = 0
        self._paced = False

    def wake(self) -> None:
        """There is bulk to send."""
        now = asyncio.get_running_loop().time()
        if self._timer is None and self._control() is not None:
            self._last_tick = self._last_busy = now
            self._rtt.take_recent()
            self._feed.ran_dry = True
            self._read_kernels(now)
            self._ping_every(min(BUSY_INTERVAL_S, self._settings.ping_interval_s))
            self._again()
        if self._feed.ran_dry and self.turns.is_due(now=now):
            self._turn(now)

    def stop(self) -> None:
        """The control lane is gone, or the link ends."""
        self._retransmitted_before = self.total_retransmitted_bytes
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._seen.clear()
        self.turns.stop()

    def lane_closed(self) -> None:
        """A bulk lane is gone: for now the others carry, whoever's turn it is."""
        self.turns.stop()

    @property
    def total_retransmitted_bytes(self) -> int:
        """What the kernel is known to have sent again, on lanes that are gone too."""
        now = sum(counts.retransmitted_bytes for counts in self._seen.values())
        return self._retransmitted_before + now

    def retransmitted_bytes(self, number: int) -> int | None:
        """What the kernel is known to have sent again on a lane."""
        counts = self._seen.get(number)
        return None if counts is None else counts.retransmitted_bytes

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        busy = not self._feed.take_ran_dry()
        if busy or self._feed.has_any:
            self._last_busy = now
        control = self._control()
        if control is None or now - self._last_busy > IDLE_S:
            self._timer = None
            self._ping_every(self._settings.ping_interval_s)
            return
        elapsed_s, self._last_tick = now - self._last_tick, now
        told = self._read_kernels(now)
        self._ping_bulk()
        if self._feed.has_any and self.turns.is_due(now=now):
            self._turn(now)
        if elapsed_s > 1.5 * self.pacing.interval_s:
            # Round trips of this interval show our own loop that stood, not the path.
            self._rtt.take_recent()
            self._again()
            return
        rtts_s, ways_s = self._rtt.take_recent()
        oldest_s = control.protocol.pings.oldest_s
        self.pacing.on_interval(
            rtts_s=rtts_s,
            ways_s=ways_s,
            delivered_bytes=told.delivered_bytes,
            elapsed_s=elapsed_s,
            busy=busy,
            waiting_s=0.0 if oldest_s is None else now - oldest_s,
            kernel_rtt_s=told.rtt_s,
        )
        self._pace()
        self._count_lanes(now, told, elapsed_s, busy)
        self._again()

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.pacing.interval_s, self._tick)

    def _count_lanes(self, now: float, told: "_Told", elapsed_s: float, busy: bool) -> None:
        before = self.count.wanted
        wanted, reason = self.count.on_interval(
            now=now,
            delivered_bytes=told.delivered_bytes,
            elapsed_s=elapsed_s,
            busy=busy,
            is_held_back=told.lost or told.limited_s > LIMITED * elapsed_s,
            is_full=self.pacing.is_full,
            rtt_s=self._rtt.min_s,
            num_open=sum(lane.protocol.carries_chunks for lane in self._lanes.values()),
        )
        if wanted != before:
            logger.info("= link to %s: %d bulk lanes wanted: %s", self._peer, wanted, reason)
            self._on_wanted(wanted)

    def _pace(self) -> None:
        cap = self.pacing.cap_bytes_per_s
        open_lanes = {n: lane for n, lane in self._lanes.items() if lane.protocol.carries_chunks}
        carrying = [lane for n, lane in open_lanes.items() if self.turns.may_carry(n)]
        shares = shares_of([lane.sent.rate_bytes_per_s for lane in carrying])
        paced = list(zip(carrying, shares, strict=True))
        # One that rests will carry all there is.
        paced += [(lane, 1.0) for n, lane in open_lanes.items() if not self.turns.may_carry(n)]
        for lane, share in paced:
            lane.carrier.expect_rate(lane.sent.rate_bytes_per_s)
            if cap is not None:
                lane.carrier.pace(cap * share)
            elif self._paced:
                lane.carrier.pace(math.inf)
        # Before the first queue nothing is set: pacing costs the kernel timers.
        self._paced = cap is not None

    def _turn(self, now: float) -> None:
        """Let the lanes change places, if that is due: what is sent next goes to the other one."""
        before = self.turns.carrying
        counts = {
            number: told
            for number, lane in self._lanes.items()
            if lane.protocol.carries_chunks and (told := lane.carrier.counts()) is not None
        }
        if self.turns.turn(counts, now=now):
            carrying = self.turns.carrying
            logger.debug("= link to %s: lane %s rests, %s carries", self._peer, before, carrying)
            for lane in self._lanes.values():
                lane.wake()

    def _ping_bulk(self) -> None:
        for number, lane in self._lanes.items():
            rests = not self.turns.may_carry(number)
            interval_s = self._settings.ping_interval_s * (REST_PINGS if rests else 1)
            if lane.protocol.pings.interval_s != interval_s:
                lane.protocol.pings.interval_s = interval_s
                lane.set_timer()

    def _read_kernels(self, now: float) -> "_Told":
        """What has changed since the last time."""
        told = _Told()
        in_turn: dict[int, KernelCounts] = {}
        for number in self._seen.keys() - self._lanes.keys():
            self._retransmitted_before += self._seen.pop(number).retransmitted_bytes
        for number, lane in self._lanes.items():
            counts = lane.carrier.counts()
            if counts is None:
                # Where nothing is told, what was written is nearly what was delivered.
                told.lost = True
                counts = replace(_NOTHING, acked_bytes=lane.bytes_sent)
            before = self._seen.get(number, _NOTHING)
            self._seen[number] = counts
            if lane.protocol.carries_chunks and self.count.wanted == 1:
                in_turn[number] = counts
            delivered = counts.acked_bytes - before.acked_bytes
            told.delivered_bytes += delivered
            told.lost = told.lost or counts.retransmitted_bytes > before.retransmitted_bytes
            told.limited_s = max(told.limited_s, counts.limited_s - before.limited_s)
            # Of one that rests, pings and their answers alone: no queue shows in them.
            is_bulk = delivered and self.turns.may_carry(number)
            if is_bulk and counts.rtt_s and (told.rtt_s is None or counts.rtt_s < told.rtt_s):
                told.rtt_s = counts.rtt_s
        self.turns.on_counts(in_turn, now=now)
        return told

    def _ping_every(self, interval_s: float) -> None:
        control = self._control()
        if control is not None:
            control.protocol.pings.interval_s = interval_s
            control.set_timer()

    def summary(self) -> dict[str, Any]:
        return {
            "paced_bytes_per_s": self.pacing.cap_bytes_per_s,
            "pacing_reason": self.pacing.reason,
            "lanes_reason": self.count.reason,
            "lane_in_turn": self.turns.carrying,
        }
