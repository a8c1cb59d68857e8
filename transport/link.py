"""Everything between two daemons: dials, keeps one lane, carries the session over it.

state       what is so                                          reason tells
connecting  no lane yet; this side dials                        -
down        no lane; this side dials again, or waits for a dial why the last try or lane ended
refused     one side refused the other; tried again slowly      which keys differ, both values
connected   a lane is open                                      -
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from geotrain.transport.backoff import LONGEST_S, Backoff
from geotrain.transport.carrier import Carrier, Dial, DialError
from geotrain.transport.choice import TWO_LANES, LaneFacts, why_not
from geotrain.transport.estimator import RttEstimator
from geotrain.transport.events import (
    Acked,
    BoardReceived,
    CodedChunk,
    Delivered,
    Event,
    LaneClosed,
    PeerNamed,
    PeerRefused,
    ViewFailed,
)
from geotrain.transport.frame import FrameHeader
from geotrain.transport.hello import Hello
from geotrain.transport.http import dial as dial_http
from geotrain.transport.lane import CLOSE_TIMEOUT_S, Lane
from geotrain.transport.messages import Message, Presence, printable
from geotrain.transport.protocol import LaneProtocol
from geotrain.transport.receiving import ReceiveStream
from geotrain.transport.sending import SendStream
from geotrain.transport.session import Session
from geotrain.transport.transitions import LinkSettings as LinkSettings
from geotrain.transport.transitions import State
from geotrain.transport.workers import ChunkWorkers, Coder

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
HELD_S = 1.0
"""A lane that lived so long was a good one: after its end the first try is soon."""
MAX_LANES = 4
"""Lanes of one peer in handshake or closing; more are turned away."""


class Link:
    """One peer; see the module. Everything but `__init__` runs on the loop's thread."""

    def __init__(
        self,
        *,
        hello: Hello,
        peer: str,
        url: str | None,
        coder: Coder,
        settings: LinkSettings,
        board: Callable[[], list[Presence]],
        on_board: Callable[[list[Presence]], None],
        on_delivered: Callable[[Message], None],
        on_acked: Callable[[int, int, list[int], list[int]], None],
        on_state: Callable[[], None],
        on_failed: Callable[[int, str], None] | None = None,
        dial: Dial | None = None,
        rng: Random | None = None,
    ) -> None:
        """
        Args:
            url: Where the peer listens; None where only it can dial.
            on_delivered: Next message of its stream; with a payload, `start` is its place in the
                in-ring. Answer with `release` once the rank is done with it.
            on_acked: (stream, view, seqs, wire_bytes of each): their payloads are free.
            on_state: `stats()` has another state or reason.
            on_failed: (view, reason): the link cannot go on with this view; it is closed.
        """
        self.peer = peer
        self._hello = hello
        self._settings = settings
        self._board = board
        self._on_board, self._on_delivered = on_board, on_delivered
        self._on_acked, self._on_state = on_acked, on_state
        self._on_failed = on_failed
        if dial is None and url is not None:
            dial = partial(
                dial_http,
                url,
                region=hello.region,
                to=peer,
                timeout_s=DIAL_TIMEOUT_S,
                congestion=settings.congestion,
            )
        self._dial = dial
        self._backoff = Backoff(rng or Random())
        self._session = Session()
        self._workers = ChunkWorkers(coder)
        self._rtt = RttEstimator()
        self._lane: Lane | None = None
        self._lane_facts: LaneFacts | None = None
        self._lanes: set[Lane] = set()
        self._without_lane = asyncio.Event()
        self._without_lane.set()
        self._closing = False
        self._state = "down" if dial is None else "connecting"
        self._reason = f"waiting for region {peer} to dial in" if dial is None else ""
        self._since = time.monotonic()
        self._bytes_sent = self._bytes_received = self._num_lanes = 0

    # Lanes ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a lane until cancelled; then nothing of the link is left."""
        try:
            if self._dial is None:
                await asyncio.get_running_loop().create_future()
            else:
                await self._keep_dialling(self._dial)
        finally:
            self._closing = True
            self.close_view()
            for lane in list(self._lanes):
                lane.carrier.abort()

    def accept(self, carrier: Carrier) -> None:
        """Take a connection on which the peer dialled in."""
        if self._closing or len(self._lanes) >= MAX_LANES:
            carrier.abort()
            return
        self._start_lane(carrier, dialled=False)

    async def close(self, reason: str) -> None:
        """Tell the peer why and close; the link dials no more. Has a deadline."""
        self._closing = True
        lanes = list(self._lanes)
        for lane in lanes:
            lane.close(reason)
        waits = [asyncio.ensure_future(lane.finished.wait()) for lane in lanes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=2 * CLOSE_TIMEOUT_S)
            for wait in late:
                wait.cancel()
        for lane in lanes:
            lane.carrier.abort()

    # The daemon's side ---------------------------------------------------------------------------

    def publish(self, entry: Presence) -> None:
        """Tell the peer a changed entry of the board; without a lane it gets the whole later."""
        if self._lane is not None:
            self._lane.protocol.publish([entry])
            self._lane.wake()

    def open_view(
        self, view: int, sends: Mapping[int, int], receives: Mapping[int, memoryview]
    ) -> None:
        """Carry this view's streams from now on, their sequence numbers from 0.

        Args:
            sends: Stream -> capacity in bytes of the in-ring of the peer's rank.
            receives: Stream -> the memory of the in-ring of this region's rank.
        """
        self.close_view()
        self._session.open_view(view, sends, receives)
        self._tell(self._session.events_received())
        self._wake()

    def restore_view(
        self, view: int, sends: Sequence[SendStream], receives: Sequence[ReceiveStream]
    ) -> None:
        """Carry on a view whose state the rank has kept through the death of a daemon."""
        self.close_view()
        self._session.restore_view(view, sends, receives)
        self._tell(self._session.events_received())
        self._wake()

    def close_view(self) -> None:
        """Drop the view; afterwards no ring or payload memory is read or written any more."""
        self._session.close_view()
        self._workers.stop()
        for lane in self._lanes:
            lane.view_closed()

    def offer(self, message: Message, payload: memoryview | None) -> None:
        """Carry a message; `payload` stays untouched until on_acked.

        Raises:
            ValueError: An unknown stream, out of sequence, or larger than the peer's ring.
        """
        self._session.offer(message, payload)
        self._wake()

    def release(self, stream: int, view: int, seqs: Sequence[int]) -> None:
        """This region's rank is done with delivered messages: their slots are free again (P-8).

        Raises:
            ValueError: An unknown stream, or messages that the rank does not hold.
        """
        self._session.release(stream, view, seqs)
        self._wake()

    def stats(self) -> dict[str, Any]:
        """The link as the status page and the ranks see it."""
        lane = self._lane
        return {
            "state": self._state,
            "since_s": round(time.monotonic() - self._since, 3),
            "reason": self._reason,
            "rtt_s": self._rtt.summary(),
            "rate_bytes_per_s": {
                "send": lane.sent.rate_bytes_per_s if lane else None,
                "receive": lane.received.rate_bytes_per_s if lane else None,
            },
            "bytes_sent": self._bytes_sent + sum(lane.bytes_sent for lane in self._lanes),
            "bytes_received": self._bytes_received
            + sum(lane.protocol.bytes_received for lane in self._lanes),
            "payload_bytes_sent": self._session.payload_bytes_sent,
            "messages_sent": self._session.messages_sent,
            "messages_received": self._session.messages_received,
            "lanes_opened": self._num_lanes,
            "peer_address": lane.carrier.peer_address if lane else "",
            "congestion": lane.carrier.congestion if lane else "",
            "congestion_refused": lane.carrier.congestion_refused if lane else "",
        }

    # Within --------------------------------------------------------------------------------------

    async def _keep_dialling(self, dial: Dial) -> None:
        while True:
            await self._without_lane.wait()
            if not self._closing:
                try:
                    async with dial() as carrier:
                        await self._run_dialled(carrier)
                except DialError as exc:
                    self._set_state("down", str(exc))
            # A pause between tries, not a wait for anything.
            refused = self._state == "refused"
            await asyncio.sleep(LONGEST_S if refused else self._backoff.next_delay_s())

    async def _run_dialled(self, carrier: Carrier) -> None:
        if self._lane is None and not self._closing:
            lane = self._start_lane(carrier, dialled=True)
            # Ends by itself: the handshake and the pings have deadlines.
            await lane.finished.wait()

    def _start_lane(self, carrier: Carrier, *, dialled: bool) -> Lane:
        protocol = LaneProtocol(
            hello=self._hello,
            dialled=dialled,
            session=self._session,
            board=self._board,
            settings=self._settings,
            rtt=self._rtt,
            now=asyncio.get_running_loop().time(),
        )
        lane = Lane(
            carrier=carrier,
            protocol=protocol,
            session=self._session,
            workers=self._workers,
            on_events=self._on_events,
            on_finished=self._on_finished,
        )
        self._lanes.add(lane)
        lane.start()
        return lane

    def _on_events(self, lane: Lane, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case PeerNamed():
                    self._choose(lane, event)
                case PeerRefused(reason=reason):
                    self._set_state("refused", reason)
                case LaneClosed(reason=reason):
                    self._on_lane_closed(lane, reason)
                case BoardReceived(entries=entries):
                    self._on_board(list(entries))
                case _:
                    self._tell([event])

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Delivered(message=message):
                    self._on_delivered(message)
                case Acked(stream=stream, view=view, seqs=seqs, wire_bytes=wire_bytes):
                    self._on_acked(stream, view, seqs, wire_bytes)
                case CodedChunk(header=header) if header.view == self._session.view:
                    self._workers.decode(event, self._on_decoded)
                case ViewFailed(view=view, reason=reason):
                    logger.error("! link to %s: view %016x: %s", self.peer, view, reason)
                    self.close_view()
                    if self._on_failed is not None:
                        self._on_failed(view, reason)

    def _on_decoded(self, header: FrameHeader, ok: bool) -> None:
        self._session.finish_chunk(header, ok=ok)
        self._tell(self._session.events_received())
        for lane in self._lanes:
            lane.throttle()
        self._wake()

    def _choose(self, lane: Lane, peer: PeerNamed) -> None:
        """A lane has shaken hands: make it the link's lane, or close it (P-13)."""
        facts = LaneFacts(boot=peer.boot, dialled=lane.protocol.dialled)
        reason = why_not(
            facts,
            current=self._lane_facts if self._lane is not None else None,
            mine_is_lower=self._hello.index < peer.index,
            is_greeting=any(one.protocol.state is State.WAIT_WELCOME for one in self._lanes),
        )
        if reason is not None:
            lane.close(reason)
            return
        old, self._lane, self._lane_facts = self._lane, lane, facts
        if old is not None:
            # P-9: the old lane ends before the new one tells what has arrived.
            old.close("replaced by a newer lane")
            old.carrier.abort()
        self._without_lane.clear()
        self._num_lanes += 1
        lane.protocol.admit(now=asyncio.get_running_loop().time())
        lane.set_timer()
        self._set_state("connected", "")

    def _on_lane_closed(self, lane: Lane, reason: str) -> None:
        if lane is self._lane:
            if time.monotonic() - self._since >= HELD_S:
                # One that closes at once must not be dialled in a tight loop.
                self._backoff.reset()
            self._lane = None
            self._without_lane.set()
            self._set_state("down", reason)
        elif self._lane is None and self._state != "refused" and TWO_LANES not in reason:
            self._set_state("down", reason)

    def _on_finished(self, lane: Lane) -> None:
        self._lanes.discard(lane)
        self._bytes_sent += lane.bytes_sent
        self._bytes_received += lane.protocol.bytes_received

    def _wake(self) -> None:
        if self._lane is not None:
            self._lane.wake()

    def _set_state(self, state: str, reason: str) -> None:
        """Note a change, and log it in one line; the same again says nothing."""
        reason = printable(reason)
        if (state, reason) == (self._state, self._reason):
            return
        if state != self._state:
            self._since = time.monotonic()
        self._state, self._reason = state, reason
        if state == "connected":
            assert self._lane is not None
            logger.info("= link to %s: connected (%s)", self.peer, self._lane.carrier.peer_address)
        elif state == "refused":
            logger.error("! link to %s: refused: %s", self.peer, reason)
        elif self._num_lanes == 0:
            logger.info("= link to %s: not there yet, trying again: %s", self.peer, reason)
        else:
            expected = self._closing or self._peer_has_left()
            level = logging.INFO if expected else logging.WARNING
            logger.log(level, "x link to %s: %s", self.peer, reason)
        self._on_state()

    def _peer_has_left(self) -> bool:
        """Whether its rank is done; nothing more is to come from there then."""
        entries = (entry for entry in self._board() if entry.region == self.peer)
        return any(entry.state == "left" for entry in entries)
