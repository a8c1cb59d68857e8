"""The driver of one lane: moves bytes between a carrier and the lane's protocol.

One write path: `_pump`, at most TURN_BYTES a turn of the loop, control ahead of bulk (P-10).
"""

import asyncio
from collections import deque
from collections.abc import Callable

from geotrain.transport.bulk import Chunk
from geotrain.transport.carrier import Carrier
from geotrain.transport.estimator import RateEstimator, chunk_bytes
from geotrain.transport.events import Event
from geotrain.transport.frame import HEADER_BYTES, chunk_header
from geotrain.transport.protocol import LaneProtocol
from geotrain.transport.session import Session
from geotrain.transport.transitions import State
from geotrain.transport.workers import ChunkWorkers

TURN_BYTES = 1 << 20
SLICE_BYTES = 256 * 1024
"""Python 3.11 copies what the kernel does not take at once, so never offer it much more."""
MIN_MEASURED_BYTES = 4 * 1024
"""Smaller reads are control frames, and say nothing of the rate."""
JOINED_BYTES = 16 * 1024
"""Of a chunk, written together with its header."""
MAX_CODING_BYTES = 32 << 20
"""At the coder, or coded and not yet written."""
MAX_DECODING_BYTES = 16 << 20
"""Above it reading pauses, until half of it is left."""
CLOSE_TIMEOUT_S = 2.0


class Lane:
    """Receiver of one carrier, driver of one LaneProtocol."""

    def __init__(
        self,
        *,
        carrier: Carrier,
        protocol: LaneProtocol,
        session: Session,
        workers: ChunkWorkers,
        on_events: Callable[["Lane", list[Event]], None],
        on_finished: Callable[["Lane"], None],
    ) -> None:
        self.carrier = carrier
        self.protocol = protocol
        self.finished = asyncio.Event()
        """Set once the connection is gone."""
        self.bytes_sent = 0
        self.sent = RateEstimator()
        self.received = RateEstimator(idle_s=0.05)
        self._loop = asyncio.get_running_loop()
        self._session = session
        self._workers = workers
        self._on_events = on_events
        self._on_finished = on_finished
        self._writable = True
        """Whether the carrier took everything so far."""
        self._room = 0
        """Bytes that may still be written in this turn."""
        self._rest = memoryview(b"")
        """What is left of the chunk being written; nothing else may be written before it."""
        self._coded: deque[tuple[Chunk, bytes, bytes | None]] = deque()
        self._coded_bytes = 0
        self._pump_scheduled = False
        self._reading_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._carrier_closing = False

    def start(self) -> None:
        self.carrier.start(self)
        self.wake()
        self.set_timer()

    # From the carrier ----------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.protocol.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        now = self._loop.time()
        if nbytes >= MIN_MEASURED_BYTES:
            self.received.on_bytes(nbytes, now=now)
        if self.protocol.buffer_updated(nbytes, now=now):
            self.collect_events()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._pump()

    def connection_lost(self, reason: str) -> None:
        self.protocol.connection_lost(reason)
        self.collect_events()
        for timer in (self._timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self._forget_bulk()
        self.finished.set()
        self._on_finished(self)

    # From the link -------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to write; it goes out in the next turn of the loop."""
        if not self._pump_scheduled and not self.finished.is_set():
            self._pump_scheduled = True
            self._loop.call_soon(self._pump_soon)

    def close(self, reason: str) -> None:
        """Send CLOSE after what must go before it, then close; aborts after CLOSE_TIMEOUT_S."""
        self.protocol.close(reason)
        self.collect_events()

    def collect_events(self) -> None:
        events = self.protocol.events_received()
        if self.protocol.state is State.CLOSED:
            self._forget_bulk()
        if events:
            self._on_events(self, events)
        self.throttle()
        self.wake()

    def throttle(self) -> None:
        """Read no faster than the workers decode."""
        waiting = self._workers.decoding_bytes
        if not self._reading_paused and waiting > MAX_DECODING_BYTES:
            self._reading_paused = True
            self.carrier.pause_reading()
        elif self._reading_paused and waiting <= MAX_DECODING_BYTES // 2:
            self._reading_paused = False
            self.carrier.resume_reading()

    def view_closed(self) -> None:
        """Let go of the ranks' memory (P-14)."""
        self.protocol.drain_chunk()
        # The chunk's header is out, so its length must follow; the bytes no longer matter.
        self._rest = memoryview(bytes(self._rest))
        self._coded.clear()
        self._coded_bytes = 0
        self.wake()

    def set_timer(self) -> None:
        due = self.protocol.get_timer()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None and not self.finished.is_set():
            self._timer = self._loop.call_at(due, self._on_timer)

    # Within --------------------------------------------------------------------------------------

    def _on_timer(self) -> None:
        self.protocol.handle_timer(now=self._loop.time())
        self.carrier.expect_rate(self.sent.rate_bytes_per_s)
        self.collect_events()
        if self.protocol.state is not State.CLOSED:
            self.set_timer()

    def _pump_soon(self) -> None:
        self._pump_scheduled = False
        self._pump()

    def _pump(self) -> None:
        if self.finished.is_set() or self._carrier_closing:
            return
        self._room = TURN_BYTES
        self._write_rest()
        while not self._blocked and self._room > 0:
            frame = self.protocol.next_control()
            if frame is None:
                break
            self._write(frame)
        if self.protocol.state is State.CLOSED:
            self._finish_closing()
            return
        # P-6: a lane in its handshake must not take chunks of the session, which has another one.
        started = self.protocol.state is State.OPEN and self._write_bulk()
        if not self._writable:
            return  # resume_writing goes on
        if started or self._rest or self._room <= 0:
            self.wake()
        else:
            self.sent.end_burst()

    def _write_bulk(self) -> bool:
        self._feed_coder()
        return not self._blocked and self._room > 0 and self._start_chunk()

    @property
    def _blocked(self) -> bool:
        return not self._writable or len(self._rest) > 0

    def _write(self, data: bytes | memoryview) -> None:
        size = len(data)
        self.bytes_sent += size
        self._room -= size
        self.carrier.write(data)

    def _write_rest(self) -> None:
        while self._rest and self._room > 0 and self._writable:
            # The cursor moves before the write: a write may end the lane at once.
            piece, self._rest = self._rest[:SLICE_BYTES], self._rest[SLICE_BYTES:]
            self._write(piece)

    def _start_chunk(self) -> bool:
        """Begin the next chunk; coded ones first, they were cut first. False: there is none."""
        while self._coded:
            chunk, header, coded = self._coded.popleft()
            self._coded_bytes -= chunk.raw.nbytes
            if self._session.is_current(chunk):
                self._write_chunk(chunk, header, chunk.raw if coded is None else memoryview(coded))
                return True
        raw = self._session.next_raw(chunk_bytes(self.sent.rate_bytes_per_s))
        if raw is None:
            return False
        header = chunk_header(
            stream=raw.stream, view=raw.view, seq=raw.seq, raw_offset=raw.offset, raw=raw.raw
        )
        self._write_chunk(raw, header, raw.raw)
        return True

    def _write_chunk(self, chunk: Chunk, header: bytes, payload: memoryview) -> None:
        assert len(header) == HEADER_BYTES
        self._session.chunk_written(chunk, payload_length=payload.nbytes)
        self.sent.on_bytes(payload.nbytes, now=self._loop.time())
        # One small copy instead of one more packet and one more wake-up of the peer.
        self._rest = payload[JOINED_BYTES:]
        self._write(header + payload[:JOINED_BYTES])
        self._write_rest()

    def _feed_coder(self) -> None:
        while (
            self._session.has_codable
            and self._workers.encoding_bytes + self._coded_bytes < MAX_CODING_BYTES
        ):
            chunk = self._session.next_codable(chunk_bytes(self.sent.rate_bytes_per_s))
            if chunk is None:
                return
            self._workers.encode(chunk, self._on_encoded)

    def _on_encoded(self, chunk: Chunk, header: bytes, coded: bytes | None) -> None:
        if self._session.is_current(chunk) and not self.finished.is_set():
            self._coded.append((chunk, header, coded))
            self._coded_bytes += chunk.raw.nbytes
            self.wake()

    def _forget_bulk(self) -> None:
        self._coded.clear()
        self._coded_bytes = 0

    def _finish_closing(self) -> None:
        """Everything is said: close once it is out, which has a deadline."""
        if self._close_timer is None:
            self._close_timer = self._loop.call_later(CLOSE_TIMEOUT_S, self.carrier.abort)
        if not self._blocked:
            self._carrier_closing = True
            if self.protocol.says_why:
                # Closing with bytes unread would reset the connection, and the kernel at the other
                # end would drop our last frame: read on, to nowhere, until the peer closes.
                self.carrier.end_writing()
            else:
                self.carrier.close()
