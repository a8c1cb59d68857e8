"""All connections to one peer: keeps a control lane, and the bulk lanes that belong to it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from geotrain.transport.backoff import HELD_S, LONGEST_S, Backoff
from geotrain.transport.bulk_lanes import BulkLanes
from geotrain.transport.carrier import Carrier, Dial, DialError
from geotrain.transport.choice import TWO_LANES, LaneFacts, why_not
from geotrain.transport.congestion import BBR
from geotrain.transport.estimator import RttEstimator
from geotrain.transport.events import (
    BoardReceived,
    Event,
    LaneClosed,
    LaneGone,
    LaneJoins,
    LanesWished,
    PeerNamed,
    PeerRefused,
)
from geotrain.transport.feed import ChunkFeed
from geotrain.transport.hello import Hello, Join
from geotrain.transport.lane import CLOSE_TIMEOUT_S, Lane
from geotrain.transport.link_state import LinkState
from geotrain.transport.lives import MAX_BULK_LANES
from geotrain.transport.messages import Presence
from geotrain.transport.protocol import LaneProtocol
from geotrain.transport.rate_control import RateControl
from geotrain.transport.session import Session
from geotrain.transport.transitions import LinkSettings, State
from geotrain.transport.workers import ChunkWorkers

MAX_LANES = MAX_BULK_LANES + 4
"""Connections of one peer, in handshake and closing too; more are turned away."""


class Lanes:
    """See the module. Everything but `__init__` runs on the loop's thread."""

    def __init__(
        self,
        *,
        hello: Hello,
        session: Session,
        workers: ChunkWorkers,
        settings: LinkSettings,
        board: Callable[[], list[Presence]],
        on_board: Callable[[list[Presence]], None],
        on_session_events: Callable[[Sequence[Event]], None],
        on_state: Callable[[], None],
        dial: Dial | None,
        rng: Random,
    ) -> None:
        """
        Args:
            on_session_events: What lanes brought of messages and views.
            dial: None where only the peer can dial.
        """
        self.control: Lane | None = None
        self.all: set[Lane] = set()
        """In handshake and closing, too."""
        self.state = LinkState(hello.to, dials=dial is not None, on_change=on_state)
        self.feed = ChunkFeed(session, workers, self._wake_for_chunks)
        self._hello = hello
        self._session = session
        self._workers = workers
        self._settings = settings
        self._board = board
        self._on_board = on_board
        self._on_session_events = on_session_events
        self._dial = dial
        self._backoff = Backoff(rng)
        self._rtt = RttEstimator()
        self._facts: LaneFacts | None = None
        self._without_control = asyncio.Event()
        self._without_control.set()
        self._closing = False
        self._least_lanes = 1
        """Bulk lanes to have where one would do: a second one may take turns with it (turns.py)."""
        self._group: asyncio.TaskGroup | None = None
        self._epoch = 0
        self._bytes_sent = self._bytes_received = self._num_opened = 0
        self.bulk = BulkLanes(
            peer=hello.to,
            session=session,
            settings=settings,
            dial=dial,
            start=lambda carrier, join: self._start_lane(carrier, dialled=True, join=join),
            on_missing=self._bulk_is_missing,
            rng=rng,
        )
        self._rates = RateControl(
            peer=hello.to,
            settings=settings,
            rtt=self._rtt,
            feed=self.feed,
            lanes=self.bulk.open,
            control=lambda: self.control,
            on_wanted=self.want,
        )

    async def run(self) -> None:
        """Keep a control lane until cancelled; then no lane is left."""
        try:
            async with asyncio.TaskGroup() as self._group:
                if self._dial is None:
                    await asyncio.get_running_loop().create_future()
                else:
                    await self._keep_dialling(self._dial)
        finally:
            self._closing = True
            self._end_bulk("the link ends")
            for lane in list(self.all):
                lane.carrier.abort()

    def accept(self, carrier: Carrier) -> None:
        """Take a connection on which the peer dialled in."""
        if self._closing or len(self.all) >= MAX_LANES:
            carrier.abort()
            return
        self._start_lane(carrier, dialled=False)

    async def close(self, reason: str) -> None:
        """Tell the peer why and close; dials no more. Has a deadline."""
        self._closing = True
        self._end_bulk(reason, say=True)
        lanes = list(self.all)
        for lane in lanes:
            lane.close(reason)
        waits = [asyncio.ensure_future(lane.finished.wait()) for lane in lanes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=2 * CLOSE_TIMEOUT_S)
            for wait in late:
                wait.cancel()
        for lane in lanes:
            lane.carrier.abort()

    def publish(self, entry: Presence) -> None:
        """Tell the peer a changed entry of the board; without a lane it gets the whole later."""
        if self.control is not None:
            self.control.protocol.publish([entry])
            self.control.wake()

    def view_closed(self) -> None:
        """Let go of the ranks' memory (P-14)."""
        self.feed.forget()
        for lane in list(self.all):
            lane.view_closed()

    def want(self, num_lanes: int) -> None:
        """So many bulk lanes would be best for what this side has to send."""
        self.bulk.want(num_lanes)
        if self.control is not None and not self.control.protocol.dialled:
            self.control.protocol.wish(max(num_lanes, self._least_lanes))
            self.control.wake()

    def wake(self) -> None:
        """There may be frames or chunks to write."""
        self.wake_control()
        if self.feed.has_any:
            self._wake_for_chunks()

    def wake_control(self) -> None:
        if self.control is not None:
            self.control.wake()

    def throttle(self) -> None:
        """The workers have decoded something: reading may go on."""
        for lane in list(self.all):
            lane.throttle()

    def stats(self) -> dict[str, Any]:
        """The lanes' part of what a link shows of itself."""
        rows = self.bulk.summary()
        for row in rows:
            row["retransmitted_bytes"] = self._rates.retransmitted_bytes(row["lane"])
        carrier = self.control.carrier if self.control is not None else None
        rates = [lane.received.rate_bytes_per_s for lane in self.all]
        received_rates = [rate for rate in rates if rate is not None]
        received = sum(lane.protocol.bytes_received for lane in self.all)
        return {
            "state": self.state.state,
            "since_s": round(self.state.age_s, 3),
            "reason": self.state.reason,
            "rtt_s": self._rtt.summary(),
            "rate_bytes_per_s": {
                "send": self.feed.sent.rate_bytes_per_s,
                "receive": sum(received_rates) if received_rates else None,
            },
            "bytes_sent": self._bytes_sent + sum(lane.bytes_sent for lane in self.all),
            "bytes_received": self._bytes_received + received,
            "retransmitted_bytes": self._rates.total_retransmitted_bytes,
            "lanes_opened": self._num_opened,
            "bulk_lanes_opened": self.bulk.num_opened,
            "peer_address": carrier.peer_address if carrier is not None else "",
            "tls": carrier.tls if carrier is not None else "",
            "congestion": carrier.congestion if carrier is not None else "",
            "congestion_refused": carrier.congestion_refused if carrier is not None else "",
            "num_lanes": len(self.bulk.open),
            "lanes": rows,
            **self._rates.summary(),
        }

    # Within --------------------------------------------------------------------------------------

    async def _keep_dialling(self, dial: Dial) -> None:
        while True:
            await self._without_control.wait()
            if not self._closing:
                try:
                    async with dial() as carrier:
                        await self._run_dialled(carrier)
                except DialError as exc:
                    self.state.set("down", str(exc), is_lasting=exc.is_lasting)
            # A pause between tries, not a wait for anything.
            refused = self.state.state == "refused"
            await asyncio.sleep(LONGEST_S if refused else self._backoff.next_delay_s())

    async def _run_dialled(self, carrier: Carrier) -> None:
        if self.control is None and not self._closing:
            lane = self._start_lane(carrier, dialled=True)
            # Ends by itself: the handshake and the pings have deadlines.
            await lane.finished.wait()

    def _start_lane(self, carrier: Carrier, *, dialled: bool, join: Join | None = None) -> Lane:
        if dialled and join is None:
            self._epoch += 1
        protocol = LaneProtocol(
            hello=replace(self._hello, epoch=self._epoch),
            dialled=dialled,
            session=self._session,
            board=self._board,
            settings=self._settings,
            rtt=self._rtt,
            now=asyncio.get_running_loop().time(),
            join=join,
        )
        lane = Lane(
            carrier=carrier,
            protocol=protocol,
            session=self._session,
            workers=self._workers,
            feed=self.feed,
            takes_chunks=self._takes_chunks,
            on_events=self._on_events,
            on_finished=self._on_finished,
        )
        self.all.add(lane)
        lane.start()
        return lane

    def _takes_chunks(self, lane: Lane) -> bool:
        if lane is not self.control:
            number = lane.protocol.lane
            return lane.protocol.carries_chunks and self._rates.turns.may_carry(number)
        # P-21: the control lane carries bulk only where nothing else has for some time.
        return self.bulk.are_missing

    def _on_events(self, lane: Lane, events: Sequence[Event]) -> None:
        now = asyncio.get_running_loop().time()
        for event in events:
            match event:
                case PeerNamed():
                    self._choose(lane, event)
                case LaneJoins(join=join):
                    self.bulk.admit(lane, join, now=now)
                    if self.control is not None:
                        self.control.carrier.carry(bulk=self.bulk.are_missing)
                case LaneGone(lane=number):
                    self.bulk.gone_there(number)
                case LanesWished(num_lanes=num_lanes):
                    self.bulk.want(num_lanes, peer=True)
                case PeerRefused(reason=reason):
                    self.state.set("refused", reason)
                case LaneClosed(reason=reason):
                    self._on_lane_closed(lane, reason)
                case BoardReceived(entries=entries):
                    self._on_board(list(entries))
                case _:
                    self._on_session_events([event])
        if lane is self.control:
            self.bulk.retry_held()
        else:
            self.wake_control()

    def _choose(self, lane: Lane, peer: PeerNamed) -> None:
        """A lane has shaken hands: make it the link's lane, or close it (P-13)."""
        facts = LaneFacts(boot=peer.boot, dialled=lane.protocol.dialled)
        reason = why_not(
            facts,
            current=self._facts if self.control is not None else None,
            mine_is_lower=self._hello.index < peer.index,
            is_greeting=any(one.protocol.state is State.WAIT_WELCOME for one in self.all),
        )
        if reason is not None:
            lane.close(reason)
            return
        old, self.control, self._facts = self.control, lane, facts
        if old is not None:
            # P-9: the old lanes end before the new one tells what has arrived.
            self._end_bulk("its control lane was replaced")
            old.close("replaced by a newer lane")
            old.carrier.abort()
        self._without_control.clear()
        self._num_opened += 1
        lane.protocol.admit(now=asyncio.get_running_loop().time())
        lane.carrier.carry(bulk=False)
        lane.set_timer()
        self.state.set("connected", "", detail=lane.carrier.peer_address)
        self._begin_bulk(lane, peer)

    def _begin_bulk(self, control: Lane, peer: PeerNamed) -> None:
        dialled, num_lanes = control.protocol.dialled, self._settings.num_lanes
        takes_turns = control.carrier.congestion == BBR and num_lanes is None
        self._least_lanes = 2 if takes_turns else 1
        self.bulk.begin(
            boot=self._hello.boot if dialled else peer.boot,
            epoch=self._epoch if dialled else peer.epoch,
            dialled=dialled,
            at_least=self._least_lanes,
            group=self._group,
        )
        if num_lanes is not None or (takes_turns and not dialled):
            self.want(self._rates.count.wanted)

    def _bulk_is_missing(self) -> None:
        if self.control is not None:
            self.control.carrier.carry(bulk=True)
            self.control.wake()

    def _end_bulk(self, reason: str, *, say: bool = False) -> None:
        self._rates.stop()
        self.bulk.end(reason, say=say)
        self.feed.forget()

    def _on_lane_closed(self, lane: Lane, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if lane is self.control:
            if self.state.age_s >= HELD_S:
                # One that closes at once must not be dialled in a tight loop.
                self._backoff.reset()
            self.control = None
            self._end_bulk("its control lane is gone")
            self._without_control.set()
            detail = lane.protocol.last_frame(now=now)
            if not (self._closing or lane.protocol.closed_by_peer):
                detail += "; all lanes end, and the session goes on over the next ones"
            self.state.set("down", reason, detail=detail, as_asked=self._ends_as_asked)
        elif lane.protocol.lane:
            self.bulk.closed(lane, reason, now=now)
            self._rates.lane_closed()
            if self.feed.has_any:
                self._wake_for_chunks()
        elif self.control is None and self.state.state != "refused" and TWO_LANES not in reason:
            self.state.set("down", reason, as_asked=self._ends_as_asked)

    @property
    def _ends_as_asked(self) -> bool:
        """Whether this side ends the link, or the peer's rank is done: nothing to warn of."""
        peer = (entry for entry in self._board() if entry.region == self._hello.to)
        return self._closing or any(entry.state == "left" for entry in peer)

    def _on_finished(self, lane: Lane) -> None:
        self.all.discard(lane)
        self._bytes_sent += lane.bytes_sent
        self._bytes_received += lane.protocol.bytes_received

    def _wake_for_chunks(self) -> None:
        self._rates.wake()
        self.bulk.wake()
        if self.control is not None and self._takes_chunks(self.control):
            self.control.wake()
