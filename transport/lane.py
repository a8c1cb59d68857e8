"""The driver of one lane: moves bytes between a carrier and the lane's protocol.

One write path: `_pump`, control ahead of bulk (P-10), and of chunks what the link's turn has room
for.
"""

import asyncio
from collections.abc import Callable

from geotrain.transport.bulk import Chunk
from geotrain.transport.carrier import Carrier
from geotrain.transport.estimator import RateEstimator, chunk_bytes
from geotrain.transport.events import Event
from geotrain.transport.feed import TURN_BYTES, ChunkFeed
from geotrain.transport.frame import HEADER_BYTES
from geotrain.transport.protocol import LaneProtocol
from geotrain.transport.session import Session
from geotrain.transport.transitions import State
from geotrain.transport.workers import ChunkWorkers

SLICE_BYTES = 256 * 1024
"""Python 3.11 copies what the kernel does not take at once, so never offer it much more."""
MIN_MEASURED_BYTES = 4 * 1024
"""Smaller reads are mostly control frames, and say nothing of the rate."""
JOINED_BYTES = 16 * 1024
"""Of a chunk, written together with its header; and of control frames that are due together."""
AHEAD_BYTES = 32 * 1024
"""Read at once where less than that is wanted: a header by itself and what follows it would take
two turns of the loop, and with many busy lanes a turn is long."""
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
        feed: ChunkFeed,
        takes_chunks: Callable[["Lane"], bool],
        on_events: Callable[["Lane", list[Event]], None],
        on_finished: Callable[["Lane"], None],
    ) -> None:
        """
        Args:
            takes_chunks: Whether chunks may be written to this lane now.
            on_events: Also called, with none, when a frame led to nothing but a change in session.
        """
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
        self._feed = feed
        self._takes_chunks = takes_chunks
        self._on_events = on_events
        self._on_finished = on_finished
        self._writable = True
        """Whether the carrier took everything so far."""
        self._rest = memoryview(b"")
        """What is left of the chunk being written; nothing else may be written before it."""
        self._pump_scheduled = False
        self._throttled = False
        self._reading_paused = False
        self._ahead = memoryview(b"")
        self._reads_ahead = False
        """Whether the buffer that was asked for last is `_ahead`."""
        self._left = memoryview(b"")
        """Read ahead and not handed on, since the chunk before it is held."""
        self._timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._carrier_closing = False

    def start(self) -> None:
        self.carrier.start(self)
        self.wake()
        self.set_timer()

    # From the carrier ----------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self.protocol.get_buffer()
        is_open = self.protocol.state in (State.OPEN, State.BULK)
        self._reads_ahead = is_open and room.nbytes < AHEAD_BYTES
        if not self._reads_ahead:
            return room
        if not self._ahead:
            self._ahead = memoryview(bytearray(AHEAD_BYTES))
        return self._ahead

    def buffer_updated(self, nbytes: int) -> None:
        now = self._loop.time()
        if nbytes >= MIN_MEASURED_BYTES:
            self.received.on_bytes(nbytes, now=now)
        if self._reads_ahead:
            self._left = self._ahead[:nbytes]
            found = self._hand_on(now)
        else:
            found = self.protocol.buffer_updated(nbytes, now=now)
        if found:
            self.collect_events()
        elif self.protocol.held:
            self._pause_or_resume()

    def _hand_on(self, now: float) -> bool:
        """Give the protocol what was read ahead; returns whether there may be something in its
        outputs."""
        found = False
        while self._left and not self.protocol.held:
            room = self.protocol.get_buffer()
            taken = min(room.nbytes, self._left.nbytes)
            # It moves before the protocol has it: what is left belongs to what follows.
            room[:taken], self._left = self._left[:taken], self._left[taken:]
            found = self.protocol.buffer_updated(taken, now=now) or found
        return found

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
        self.finished.set()
        self._on_finished(self)

    # From the link -------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to write; it goes out in the next turn of the loop."""
        # A carrier that is full calls back by itself; but closing has a deadline to set.
        idle = self._writable or self.protocol.state is State.CLOSED
        if idle and not self._pump_scheduled and not self.finished.is_set():
            self._pump_scheduled = True
            self._loop.call_soon(self._pump_soon)

    def close(self, reason: str) -> None:
        """Send CLOSE after what must go before it, then close; aborts after CLOSE_TIMEOUT_S."""
        self.protocol.close(reason)
        self.collect_events()

    def drop(self, reason: str) -> None:
        """End it now: afterwards nothing of it is read or written any more."""
        self.protocol.connection_lost(reason)
        self.collect_events()
        self.carrier.abort()

    def collect_events(self) -> None:
        self._on_events(self, self.protocol.events_received())
        self.throttle()
        self.wake()

    def throttle(self) -> None:
        """Read no faster than the workers decode."""
        waiting = self._workers.decoding_bytes
        most = MAX_DECODING_BYTES // 2 if self._throttled else MAX_DECODING_BYTES
        self._throttled = waiting > most
        self._pause_or_resume()

    def retry_held(self) -> None:
        """The MESSAGE that a chunk here waits for may have come (P-19)."""
        if self.protocol.held and self.protocol.retry_chunk():
            self._hand_on(self._loop.time())
            self.collect_events()

    def view_closed(self) -> None:
        """Let go of the ranks' memory (P-14)."""
        self.protocol.drain_chunk()
        self.retry_held()
        # The chunk's header is out, so its length must follow; the bytes no longer matter.
        self._rest = memoryview(bytes(self._rest))
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

    def _pause_or_resume(self) -> None:
        wanted = self._throttled or self.protocol.held
        if wanted != self._reading_paused:
            self._reading_paused = wanted
            if wanted:
                self.carrier.pause_reading()
            else:
                self.carrier.resume_reading()

    def _pump_soon(self) -> None:
        self._pump_scheduled = False
        self._pump()

    def _pump(self) -> None:
        if self.finished.is_set() or self._carrier_closing:
            return
        self._write_rest()
        control_left = not self._write_control()
        if self.protocol.state is State.CLOSED:
            self._finish_closing()
            return
        chunks_left = self._write_chunks() if self._takes_chunks(self) else len(self._rest) > 0
        if self._writable and (control_left or chunks_left):
            self.wake()  # else resume_writing goes on

    @property
    def _blocked(self) -> bool:
        return not self._writable or len(self._rest) > 0

    def _write_control(self) -> bool:
        """Whole frames other than chunks; returns whether all of them are out."""
        room = TURN_BYTES
        while not self._blocked and room > 0:
            # Together: each write is a packet of its own, and of those only so many are under way.
            frames = self._next_control_frames()
            if not frames:
                is_control = self.protocol.state is State.OPEN
                if is_control and self._feed.has_any and not self._takes_chunks(self):
                    # A MESSAGE among them brought chunks for the other lanes.
                    self._feed.on_ready()
                return True
            data = b"".join(frames) if len(frames) > 1 else frames[0]
            room -= len(data)
            self.bytes_sent += len(data)
            self.carrier.write(data)
        return False

    def _next_control_frames(self) -> list[bytes]:
        frames: list[bytes] = []
        size = 0
        while size < JOINED_BYTES:
            frame = self.protocol.next_control()
            if frame is None:
                break
            frames.append(frame)
            size += len(frame)
        return frames

    def _write_chunks(self) -> bool:
        """The next chunk, as far as it goes; returns whether there may be more to write."""
        self._feed.feed_coder(chunk_bytes(self.sent.rate_bytes_per_s))
        if self._blocked or self._feed.room <= 0:
            return True
        found = self._feed.take(chunk_bytes(self.sent.rate_bytes_per_s))
        if found is None:
            self._feed.nothing_left()
            self.sent.end_burst()
            return False
        self._write_chunk(*found)
        return True

    def _write_chunk(self, chunk: Chunk, header: bytes, payload: memoryview) -> None:
        assert len(header) == HEADER_BYTES
        now = self._loop.time()
        self._session.chunk_written(chunk, lane=self.protocol.lane, payload_length=payload.nbytes)
        self.sent.on_bytes(payload.nbytes, now=now)
        self._feed.sent.on_bytes(payload.nbytes, now=now)
        # One small copy instead of one more packet and one more wake-up of the peer.
        self._rest = payload[JOINED_BYTES:]
        self._write(header + payload[:JOINED_BYTES])
        self._write_rest()

    def _write_rest(self) -> None:
        while self._rest and self._feed.room > 0 and self._writable:
            # The cursor moves before the write: a write may end the lane at once.
            piece, self._rest = self._rest[:SLICE_BYTES], self._rest[SLICE_BYTES:]
            self._write(piece)

    def _write(self, data: bytes | memoryview) -> None:
        size = len(data)
        self.bytes_sent += size
        self._feed.wrote(size)
        self.carrier.write(data)

    def _finish_closing(self) -> None:
        """Everything is said: close once it is out, which has a deadline."""
        if self._close_timer is None:
            self._close_timer = self._loop.call_later(CLOSE_TIMEOUT_S, self.carrier.abort)
        if self._blocked:
            return
        self._carrier_closing = True
        if self.protocol.says_why:
            # Closing with bytes unread would reset the connection, and the kernel at the other end
            # would drop our last frame: read on, to nowhere, until the peer closes.
            self.carrier.end_writing()
        else:
            self.carrier.close()
