"""Everything between two daemons: the session, and the lanes that carry it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from geotrain.transport.carrier import Carrier, Dial
from geotrain.transport.events import Acked, CodedChunk, Delivered, Event, ViewFailed
from geotrain.transport.frame import FrameHeader
from geotrain.transport.hello import Hello
from geotrain.transport.http import dial as dial_http
from geotrain.transport.lanes import Lanes
from geotrain.transport.messages import Message, Presence
from geotrain.transport.receiving import ReceiveStream
from geotrain.transport.sending import SendStream
from geotrain.transport.session import Session
from geotrain.transport.tls import Tls
from geotrain.transport.transitions import LinkSettings as LinkSettings
from geotrain.transport.workers import ChunkWorkers, Coder

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0


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
        tls: Tls | None = None,
        rng: Random | None = None,
    ) -> None:
        """
        Args:
            url: Where the peer listens; None where only it can dial.
            tls: For an https:// url, and for no other.
            on_delivered: Next message of its stream; with a payload, `start` is its place in the
                in-ring. Answer with `release` once the rank is done with it.
            on_acked: (stream, view, seqs, wire_bytes of each): their payloads are free.
            on_state: `stats()` has another state or reason.
            on_failed: (view, reason): the link cannot go on with this view; it is closed.
        """
        self.peer = peer
        self._on_delivered = on_delivered
        self._on_acked = on_acked
        self._on_failed = on_failed
        if dial is None and url is not None:
            dial = partial(
                dial_http,
                url,
                region=hello.region,
                to=peer,
                timeout_s=DIAL_TIMEOUT_S,
                congestion=settings.congestion,
                tls=tls,
            )
        self._session = Session()
        self._workers = ChunkWorkers(coder)
        self.lanes = Lanes(
            hello=hello,
            session=self._session,
            workers=self._workers,
            settings=settings,
            board=board,
            on_board=on_board,
            on_session_events=self._tell,
            on_state=on_state,
            dial=dial,
            rng=rng or Random(),
        )

    # Its life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep lanes until cancelled; then nothing of the link is left."""
        try:
            await self.lanes.run()
        finally:
            self.close_view()

    def accept(self, carrier: Carrier) -> None:
        """Take a connection on which the peer dialled in."""
        self.lanes.accept(carrier)

    async def close(self, reason: str) -> None:
        """Tell the peer why and close; the link dials no more. Has a deadline."""
        await self.lanes.close(reason)

    # The daemon's side ---------------------------------------------------------------------------

    def publish(self, entry: Presence) -> None:
        """Tell the peer a changed entry of the board; without a lane it gets the whole later."""
        self.lanes.publish(entry)

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
        self.lanes.wake()

    def restore_view(
        self, view: int, sends: Sequence[SendStream], receives: Sequence[ReceiveStream]
    ) -> None:
        """Carry on a view whose state the rank has kept through the death of a daemon."""
        self.close_view()
        self._session.restore_view(view, sends, receives)
        self._tell(self._session.events_received())
        self.lanes.wake()

    def close_view(self) -> None:
        """Drop the view; afterwards no ring or payload memory is read or written any more."""
        self._session.close_view()
        self._workers.stop()
        self.lanes.view_closed()

    def offer(self, message: Message, payload: memoryview | None) -> None:
        """Carry a message; `payload` stays untouched until on_acked.

        Raises:
            ValueError: An unknown stream, out of sequence, or larger than the peer's ring.
        """
        self._session.offer(message, payload)
        self.lanes.wake()

    def release(self, stream: int, view: int, seqs: Sequence[int]) -> None:
        """This region's rank is done with delivered messages: their slots are free again (P-8).

        Raises:
            ValueError: An unknown stream, or messages that the rank does not hold.
        """
        self._session.release(stream, view, seqs)
        self.lanes.wake()

    def stats(self) -> dict[str, Any]:
        """The link as the status page and the ranks see it."""
        return {
            **self.lanes.stats(),
            "payload_bytes_sent": self._session.payload_bytes_sent,
            "messages_sent": self._session.messages_sent,
            "messages_received": self._session.messages_received,
        }

    # Within --------------------------------------------------------------------------------------

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
        self.lanes.throttle()
        self.lanes.wake_control()
