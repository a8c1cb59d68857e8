"""One lane: handshake, pings, boards, and the frames of the session it carries. Sans-I/O.

A control lane carries everything but bulk, and bulk too while there is no bulk lane; a bulk lane
carries chunks. Which of the two a lane is that the peer dialled, its first frame says.

Inputs: bytes (`get_buffer` and `buffer_updated`), `handle_timer`, `admit`, `publish`, `close`.
Outputs: `next_control` (whole frames; chunks come from the session), `events_received`,
`get_timer`. What may arrive when, and what it leads to, is the table in transitions.py; whatever
is not in it closes the lane (P-2).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable

from geotrain.transport.control_records import (
    board_frame,
    close_frame,
    read_board,
    read_close,
    read_hello,
    read_join,
    read_refuse,
)
from geotrain.transport.estimator import RttEstimator
from geotrain.transport.events import (
    BoardReceived,
    CodedChunk,
    Event,
    LaneClosed,
    LaneJoins,
    LanesWished,
    PeerNamed,
    PeerRefused,
)
from geotrain.transport.frame import (
    RAW,
    FrameHeader,
    FrameType,
    ProtocolError,
    control_frame,
)
from geotrain.transport.hello import Differing, Hello, Join, disagreement
from geotrain.transport.lives import MAX_BULK_LANES
from geotrain.transport.messages import Presence
from geotrain.transport.pings import Pings
from geotrain.transport.reader import HOLD, Frame, FrameReader, Place
from geotrain.transport.session import Session
from geotrain.transport.transitions import TRANSITIONS, LinkSettings, State, T

HANDSHAKE_S = 10.0


class LaneProtocol:
    """The rules of one lane; see the module."""

    def __init__(
        self,
        *,
        hello: Hello,
        dialled: bool,
        session: Session,
        board: Callable[[], Iterable[Presence]],
        settings: LinkSettings,
        rtt: RttEstimator,
        now: float,
        join: Join | None = None,
    ) -> None:
        """
        Args:
            dialled: Whether this side dialled, and so speaks first.
            session: Told when a lane opens in `admit`, and when one that was open closes.
            board: The whole board as it stands; asked when the control lane opens.
            rtt: Of the control lane.
            now: Monotonic seconds.
            join: Makes a dialled lane a bulk lane.
        """
        self.dialled = dialled
        self.lane = join.lane if join is not None else 0
        """The number of a bulk lane; 0: the control lane, or not known yet."""
        self.state = State.WAIT_HELLO
        if dialled:
            self.state = State.WAIT_WELCOME if join is None else State.WAIT_JOINED
        self.close_reason = ""
        self.says_why = False
        """Whether the last frame of a closed lane tells the peer why."""
        self.closed_by_peer = False
        """Whether the peer said CLOSE."""
        self.bytes_received = 0
        self.retiring = False
        """Whether CLOSE is said or about to be, and only what the peer still sends is awaited."""
        self.pings = Pings(interval_s=settings.ping_interval_s)
        self._hello = hello
        self._session = session
        self._board = board
        self._settings = settings
        self._rtt = rtt
        self._now = now
        self._reader = FrameReader(self._place)
        self._events: list[Event] = []
        self._control: deque[bytes] = deque()
        self._to_publish: dict[str, Presence] = {}
        self._deadline = now + HANDSHAKE_S
        self._pong: tuple[int, float] | None = None
        self._last: tuple[FrameHeader, float] | None = None
        if join is not None:
            self._control.append(control_frame(T.JOIN, join.to_map()))
        elif dialled:
            self._control.append(control_frame(T.HELLO, hello.to_map()))

    # In ------------------------------------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Where the peer's next bytes go; never empty."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int, *, now: float) -> bool:
        """The first `nbytes` of the buffer hold the peer's next bytes.

        Never raises for bad input: the lane closes and `close_reason` says why.

        Returns:
            Whether there may be something in the outputs.
        """
        if self.state is State.CLOSED:
            return False
        self._now = now
        self.bytes_received += nbytes
        try:
            frame = self._reader.buffer_updated(nbytes)
            if frame is not None:
                self._handle(frame)
        except ProtocolError as exc:
            self.close(f"protocol error: {exc}")
            return True
        if frame is None:
            return False
        self._last = (frame.header, now)
        # Most frames are chunks in the middle of a message, and lead to nothing.
        return frame.header.type is not T.CHUNK or bool(self._events) or self._session.has_output

    def retry_chunk(self) -> bool:
        """Look again for the place of the chunk that is held; returns whether reading goes on."""
        try:
            return self._reader.retry()
        except ProtocolError as exc:
            self.close(f"protocol error: {exc}")
            return True

    def admit(self, *, now: float) -> None:
        """After PeerNamed: this is the control lane now; all lanes before it are closed (P-9).
        After LaneJoins: this bulk lane is one of the link's.
        """
        if self.state is State.JOINING:
            self.state = State.BULK
            self._session.lives.up(self.lane)
            if not self.dialled:
                self._control.append(control_frame(T.JOINED))
        else:
            assert self.state is State.NAMED
            if not self.dialled:
                self._control.append(control_frame(T.WELCOME, self._hello.to_map()))
            self.state = State.OPEN
            self.publish(self._board())
            self._session.lane_up()
        self.handle_timer(now=now)

    def publish(self, entries: Iterable[Presence]) -> None:
        """Tell the peer these entries of the board; a later entry for a region replaces."""
        if self.state is State.OPEN:
            self._to_publish.update((entry.region, entry) for entry in entries)

    def drain_chunk(self) -> None:
        """The view is closed: what is left of a chunk in progress goes to scratch (P-14)."""
        self._reader.drain()

    def wish(self, num_lanes: int) -> None:
        """Tell the peer how many bulk lanes this side would like to have."""
        if self.state is State.OPEN:
            self._control.append(control_frame(T.LANES, seq=num_lanes))

    def retire(self, reason: str, *, now: float) -> None:
        """End a bulk lane without loss: what is written goes out, and what comes is taken."""
        self.retiring = True
        self._deadline = now + self._settings.silent_s
        self._control.append(close_frame(reason))

    def close(self, reason: str) -> None:
        """End the lane and tell the peer why; `next_control` has the last frames.

        Entries of the board that were not written yet go first: they may say why, too.
        """
        boards = []
        while self.state is State.OPEN and self._to_publish:
            boards.append(board_frame(self._to_publish))
        self._end(reason, *boards, close_frame(reason))

    def connection_lost(self, reason: str) -> None:
        """The connection ended without CLOSE."""
        self._end(reason)

    def handle_timer(self, *, now: float) -> None:
        """Send a ping that is due; close a lane that is silent or never finished its handshake."""
        if self.state is State.CLOSED:
            return
        if self.state not in (State.OPEN, State.BULK):
            if now >= self._deadline:
                self.close(f"no handshake within {HANDSHAKE_S:g} s ({self.state.value})")
            return
        silent_s, oldest_s = self._settings.silent_s, self.pings.oldest_s
        if self.retiring:
            if now >= self._deadline:
                self.connection_lost("not closed by the peer in time")
        elif oldest_s is not None and self.pings.are_lost(now, silent_s, self._works_s):
            self.close(f"ping timeout: silent for {now - oldest_s:.1f} s")
        elif now >= self.pings.due_s:
            self._control.append(control_frame(T.PING, seq=self.pings.send(now=now)))

    # Out -----------------------------------------------------------------------------------------

    def next_control(self) -> bytes | None:
        """The next whole frame to write, other than chunks, or None; goes ahead of bulk (P-10)."""
        if self._control:
            return self._control.popleft()
        if self.state not in (State.OPEN, State.BULK) or self.retiring:
            return None
        if self._pong is not None:
            (number, came_s), self._pong = self._pong, None
            return control_frame(T.PONG, seq=number, raw_offset=int(came_s * 1e6))
        if self.state is State.BULK:
            return None
        if self._to_publish:
            return board_frame(self._to_publish)
        return self._session.next_control()

    def events_received(self) -> list[Event]:
        events, self._events = self._events, []
        if self.state in (State.OPEN, State.BULK):
            events.extend(self._session.events_received())
        return events

    def get_timer(self) -> float | None:
        """When `handle_timer` is due next."""
        if self.state is State.CLOSED:
            return None
        if self.state not in (State.OPEN, State.BULK) or self.retiring:
            return self._deadline
        if self.pings.oldest_s is not None:
            return min(self.pings.due_s, self.pings.oldest_s + self._settings.silent_s)
        return self.pings.due_s

    @property
    def held(self) -> bool:
        """Whether nothing may be read until `retry_chunk` says so (P-19)."""
        return self._reader.held

    @property
    def carries_chunks(self) -> bool:
        """Whether this is a bulk lane to which chunks may be written."""
        # One that the peer dialled has shown with its first answer that the peer knows it is open.
        proven = self.dialled or self.pings.answered
        return self.state is State.BULK and proven and not self.retiring

    def last_frame(self, *, now: float) -> str:
        """What came last, for people."""
        if self._last is None:
            return "no frame ever came"
        header, at = self._last
        of = f" of message {header.seq} of stream {header.stream}" * (header.type is T.CHUNK)
        return f"last frame {header.type.name}{of}, {now - at:.1f} s ago"

    # Frames --------------------------------------------------------------------------------------

    def _place(self, header: FrameHeader) -> Place:
        self._transition(header.type)
        if header.type is not T.CHUNK:
            return memoryview(bytearray(header.payload_length))
        place = self._session.place(header)
        if place is HOLD and self.state is State.OPEN:
            # Nothing else can bring the MESSAGE: on one lane it goes ahead of its chunks.
            raise ProtocolError(f"CHUNK of message {header.seq} before its header")
        if isinstance(place, memoryview) and header.coding != RAW:
            return memoryview(bytearray(header.payload_length))
        return place

    @property
    def _works_s(self) -> float:
        """When the path was last seen to work by another lane."""
        return self._rtt.last_sample_at if self.state is State.BULK else -math.inf

    def _transition(self, kind: FrameType) -> tuple[str, State]:
        found = TRANSITIONS[self.state].get(kind)
        if found is None:
            raise ProtocolError(f"{kind.name} while {self.state.value}")
        return found

    def _handle(self, frame: Frame) -> None:
        header = frame.header
        if header.type is T.CHUNK:
            self._on_chunk(frame)
            return
        handler, following = self._transition(header.type)
        if not frame.intact:
            raise ProtocolError(f"checksum of a {header.type.name} frame")
        getattr(self, handler)(header, frame.payload)
        if self.state is not State.CLOSED:
            self.state = following

    def _on_hello(self, header: FrameHeader, payload: memoryview) -> None:
        theirs = read_hello(header.type, payload)
        refusal = disagreement(self._hello, theirs)
        if refusal is None:
            named = PeerNamed(boot=theirs.boot, index=theirs.index, epoch=theirs.epoch)
            self._events.append(named)
            return
        reason, differing = refusal
        record = {"reason": reason, "differing": [list(row) for row in differing]}
        self._refused(reason, differing, control_frame(T.REFUSE, record))

    def _on_refuse(self, header: FrameHeader, payload: memoryview) -> None:
        self._refused(*read_refuse(payload), None)

    def _on_close(self, header: FrameHeader, payload: memoryview) -> None:
        self.closed_by_peer = True
        self._end(f"closed by the other side: {read_close(payload)}")

    def _on_board(self, header: FrameHeader, payload: memoryview) -> None:
        self._events.append(BoardReceived(entries=read_board(payload)))

    def _on_session(self, header: FrameHeader, payload: memoryview) -> None:
        self._session.receive(header, payload)

    def _on_join(self, header: FrameHeader, payload: memoryview) -> None:
        join = read_join(payload)
        self.lane = join.lane
        self._events.append(LaneJoins(join=join))

    def _on_joined(self, header: FrameHeader, payload: memoryview) -> None:
        self._events.append(LaneJoins(join=None))

    def _on_lanes(self, header: FrameHeader, payload: memoryview) -> None:
        self._events.append(LanesWished(num_lanes=min(max(header.seq, 1), MAX_BULK_LANES)))

    def _on_chunk(self, frame: Frame) -> None:
        header, payload, intact = frame
        if payload is None:
            return
        if header.coding == RAW:
            self._session.finish_chunk(header, ok=intact)
            return
        target = self._session.mark_pending(header)
        if target is not None:
            self._events.append(CodedChunk(header=header, coded=payload, target=target))

    def _on_ping(self, header: FrameHeader, payload: memoryview) -> None:
        # One answer for all pings so far, so that a flood of them holds no memory.
        self._pong = (header.seq, self._now)

    def _on_pong(self, header: FrameHeader, payload: memoryview) -> None:
        rtt_s = self.pings.on_pong(header.seq, now=self._now)
        if rtt_s is not None and self.state is State.OPEN:
            # By two clocks: it says nothing by itself, but its changes are those of one direction.
            way_s = header.raw_offset * 1e-6 - (self._now - rtt_s)
            self._rtt.on_sample(rtt_s, now=self._now, way_s=way_s)

    def _refused(self, reason: str, differing: Differing, answer: bytes | None) -> None:
        self._events.append(PeerRefused(reason=reason, differing=differing))
        self._end(f"refused: {reason}", *([answer] if answer is not None else []))

    def _end(self, reason: str, *last_frames: bytes) -> None:
        if self.state is State.CLOSED:
            return
        events, was = self.events_received(), self.state
        self.state = State.CLOSED
        self.close_reason = reason
        placed = self._reader.discard()
        if placed is not None:
            self._session.abandon_chunk(placed)
        if was is State.OPEN:
            self._session.lane_down()
        elif was is State.BULK:
            self._session.lives.down(self.lane)
        self._control.clear()
        self.says_why = bool(last_frames)
        self._control.extend(last_frames)
        self._events = [*events, LaneClosed(reason=reason)]
