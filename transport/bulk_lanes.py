"""The bulk lanes of a link: dialled, admitted, given up, and dialled again.

The side that dialled the control lane dials them (the other may not be able to), as many as either
side would like. They end with their control lane.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from geotrain.transport.backoff import HELD_S, Backoff
from geotrain.transport.carrier import Carrier, Dial, DialError
from geotrain.transport.hello import Join
from geotrain.transport.lane import Lane
from geotrain.transport.messages import printable
from geotrain.transport.session import Session
from geotrain.transport.transitions import LinkSettings

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""So long without a bulk lane, and the control lane carries bulk too (P-21)."""
NOT_NEEDED = "fewer lanes carry as much"


@dataclass(eq=False)
class _Slot:
    """One lane that is wanted, whichever connection serves it."""

    task: asyncio.Task[None] | None = None
    lane: Lane | None = None
    wanted: bool = True


class BulkLanes:
    """See the module. Everything runs on the loop's thread."""

    def __init__(
        self,
        *,
        peer: str,
        session: Session,
        settings: LinkSettings,
        dial: Dial | None,
        start: Callable[[Carrier, Join], Lane],
        on_missing: Callable[[], None],
        rng: Random,
    ) -> None:
        """
        Args:
            start: Begins a lane on a connection dialled here.
            on_missing: `are_missing` has become true.
        """
        self.open: dict[int, Lane] = {}
        """By number; some may not carry chunks yet, or any more."""
        self.num_opened = 0
        self._peer = peer
        self._session = session
        self._settings = settings
        self._dial = dial
        self._start = start
        self._on_missing = on_missing
        self._missing_timer: asyncio.TimerHandle | None = None
        self.are_missing = False
        """Whether there should be bulk lanes, and for some time none has been open."""
        self._rng = rng
        self._group: asyncio.TaskGroup | None = None
        self._slots: list[_Slot] = []
        self._epoch: Join | None = None
        """What a lane must name to be one of the present control lane; `lane` means nothing."""
        self._dialled = False
        self._wanted_here = self._wanted_there = self._least = 1
        self._last_number = 0
        self._told = ""

    # The control lane ----------------------------------------------------------------------------

    def begin(
        self,
        *,
        boot: int,
        epoch: int,
        dialled: bool,
        at_least: int,
        group: asyncio.TaskGroup | None,
    ) -> None:
        """A control lane is open.

        Args:
            boot: Of the daemon that dialled it.
            dialled: Whether this side did, and so dials bulk lanes.
            at_least: So many are dialled, however few are wanted.
            group: Owns the tasks that dial.
        """
        self._epoch = Join(boot=boot, epoch=epoch, lane=1)
        self._dialled = dialled
        self._group = group
        self._wanted_there = 1
        self._least = at_least
        self._watch_missing()
        self._match()

    def end(self, reason: str, *, say: bool = False) -> None:
        """The control lane is gone: afterwards nothing of a bulk lane is read or written.

        Args:
            say: Tell the peer, on each lane.
        """
        self._epoch = None
        self._watch_missing()
        if say:
            for slot in self._slots:
                slot.wanted = False
            for lane in list(self.open.values()):
                lane.close(reason)
            self._slots = [slot for slot in self._slots if slot.lane is None]
        self._match()
        for lane in list(self.open.values()):
            lane.drop(reason)

    def want(self, num_lanes: int, *, peer: bool = False) -> None:
        """So many would be best for what this side, or the peer, has to send."""
        if peer:
            self._wanted_there = num_lanes
        else:
            self._wanted_here = num_lanes
        self._match()

    # Lanes ---------------------------------------------------------------------------------------

    def admit(self, lane: Lane, join: Join | None, *, now: float) -> None:
        """A lane has shaken hands: it becomes one of ours, or closes.

        Args:
            join: What the peer named; None where this side dialled.
        """
        number = lane.protocol.lane
        reason = self._session.lives.why_not(number)
        if self._epoch is None:
            reason = "its control lane is gone"
        elif join is not None and (join.boot, join.epoch) != (self._epoch.boot, self._epoch.epoch):
            reason = "its control lane is gone"
        elif join is not None and self._dialled:
            reason = "bulk lanes are dialled by who dialled the control lane"
        if reason is not None:
            lane.close(reason)
            return
        self.num_opened += 1
        self.open[number] = lane
        self._watch_missing()
        lane.protocol.admit(now=now)
        lane.set_timer()

    def gone_there(self, number: int) -> None:
        """The peer's end is closed."""
        greeting = [slot.lane for slot in self._slots if slot.lane is not None]
        numbered = {lane.protocol.lane: lane for lane in greeting} | self.open
        lane = numbered.get(number)
        # A retiring lane is read to its end, which is near: nothing of it gets lost.
        if lane is not None and not lane.protocol.retiring:
            lane.drop(f"{self._peer} has closed it")

    def closed(self, lane: Lane, reason: str, *, now: float) -> None:
        """Note the end of a lane, in one line of the log."""
        number = lane.protocol.lane
        if self.open.get(number) is not lane:
            return
        del self.open[number]
        self._watch_missing()
        if self._epoch is None:
            return  # The control lane's own line tells it.
        if lane.protocol.retiring or lane.protocol.closed_by_peer:
            logger.info("= link to %s: lane %d ended: %s", self._peer, number, printable(reason))
            return
        left = sum(one.protocol.carries_chunks for one in self.open.values())
        over = f"{left} other lane{'s' * (left != 1)}" if left else "the control lane"
        logger.warning(
            "x link to %s: lane %d: %s; %s; what it had not delivered goes over %s%s",
            self._peer,
            number,
            printable(reason),
            lane.protocol.last_frame(now=now),
            over,
            ", and it is dialled again" if self._dialled else "",
        )

    def wake(self) -> None:
        """There may be chunks to write."""
        for lane in self.open.values():
            lane.wake()

    def retry_held(self) -> None:
        """A MESSAGE has come: a lane may have waited for it (P-19)."""
        for lane in list(self.open.values()):
            lane.retry_held()

    def _watch_missing(self) -> None:
        self.are_missing = False
        if self._missing_timer is not None:
            self._missing_timer.cancel()
            self._missing_timer = None
        if self._epoch is not None and not self.open:
            loop = asyncio.get_running_loop()
            self._missing_timer = loop.call_later(GRACE_S, self._miss)

    def _miss(self) -> None:
        self.are_missing = True
        self._on_missing()

    # Dialling ------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """How many this side keeps dialled."""
        if self._epoch is None or not self._dialled or self._group is None:
            return 0
        if self._settings.num_lanes is not None:
            return self._settings.num_lanes
        return max(self._wanted_here, self._wanted_there, self._least)

    def _match(self) -> None:
        while len(self._slots) > self.wanted:
            self._give_up(self._slots.pop())
        while len(self._slots) < self.wanted:
            assert self._group is not None and self._epoch is not None and self._dial is not None
            slot = _Slot()
            self._slots.append(slot)
            slot.task = self._group.create_task(self._keep(slot, self._epoch, self._dial))

    def _give_up(self, slot: _Slot) -> None:
        slot.wanted = False
        assert slot.task is not None
        lane = slot.lane
        if lane is not None and self._epoch is not None and lane.protocol.carries_chunks:
            lane.protocol.retire(NOT_NEEDED, now=asyncio.get_running_loop().time())
            lane.set_timer()
            lane.wake()
        else:
            if lane is not None:
                lane.drop(NOT_NEEDED)
            slot.task.cancel()

    async def _keep(self, slot: _Slot, epoch: Join, dial: Dial) -> None:
        """Have a lane for this slot until it is not wanted any more."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._rng)
        while slot.wanted:
            began: float | None = None
            try:
                async with dial() as carrier:
                    began = loop.time()
                    self._last_number += 1
                    join = Join(boot=epoch.boot, epoch=epoch.epoch, lane=self._last_number)
                    slot.lane = self._start(carrier, join)
                    # Ends by itself: the handshake and the pings have deadlines.
                    await slot.lane.finished.wait()
            except DialError as exc:
                self._tell_once(str(exc))
            finally:
                slot.lane = None
            if began is not None and loop.time() - began >= HELD_S:
                backoff.reset()
            if slot.wanted:
                # A pause between tries, not a wait for anything.
                await asyncio.sleep(backoff.next_delay_s())

    def _tell_once(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            logger.info("= link to %s: no further bulk lane: %s", self._peer, printable(reason))

    def summary(self) -> list[dict[str, Any]]:
        return [
            {
                "lane": number,
                "peer_address": lane.carrier.peer_address,
                "congestion": lane.carrier.congestion,
                "rtt_s": lane.protocol.pings.last_s,
                "rate_bytes_per_s": {
                    "send": lane.sent.rate_bytes_per_s,
                    "receive": lane.received.rate_bytes_per_s,
                },
                "bytes_sent": lane.bytes_sent,
                "bytes_received": lane.protocol.bytes_received,
            }
            for number, lane in sorted(self.open.items())
        ]
