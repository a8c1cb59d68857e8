"""One lane: handshake, pings, boards, and the frames of the session it carries. Sans-I/O.

Inputs: bytes (`get_buffer` and `buffer_updated`), `handle_timer`, `admit`, `publish`, `close`.
Outputs: `next_control` (whole frames; chunks come from the session), `events_received`,
`get_timer`. What may arrive when, and what it leads to, is the table in transitions.py; whatever
is not in it closes the lane (P-2).
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from geotrain.transport.estimator import RttEstimator
from geotrain.transport.events import (
    BoardReceived,
    CodedChunk,
    Event,
    LaneClosed,
    PeerNamed,
    PeerRefused,
)
from geotrain.transport.frame import (
    MAX_CONTROL_BYTES,
    RAW,
    FrameHeader,
    FrameType,
    ProtocolError,
    control_frame,
)
from geotrain.transport.hello import Differing, Hello, disagreement, read_refusal
from geotrain.transport.maps import get_list, get_str, pack, unpack
from geotrain.transport.messages import Presence
from geotrain.transport.reader import Frame, FrameReader
from geotrain.transport.session import Session
from geotrain.transport.transitions import TRANSITIONS, LinkSettings, State, T

HANDSHAKE_S = 10.0
MAX_BOARD_BYTES = 128 * 1024
"""Packed entries of one BOARD frame; a bigger board goes in several."""
MAX_REASON_CHARS = 1_024


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
    ) -> None:
        """
        Args:
            dialled: Whether this side dialled, and so speaks first.
            session: Gets `lane_up` in `admit` and `lane_down` when an admitted lane closes.
            board: The whole board as it stands; asked when the lane opens.
            now: Monotonic seconds.
        """
        self.dialled = dialled
        self.state = State.WAIT_WELCOME if dialled else State.WAIT_HELLO
        self.close_reason = ""
        self.says_why = False
        """Whether the last frame of a closed lane tells the peer why."""
        self.bytes_received = 0
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
        self._next_ping = 0.0
        self._pings: deque[tuple[int, float]] = deque()
        self._num_pings = 0
        self._pong: int | None = None
        if dialled:
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
        # Most frames are chunks in the middle of a message, and lead to nothing.
        return frame.header.type is not T.CHUNK or bool(self._events) or self._session.has_output

    def admit(self, *, now: float) -> None:
        """After PeerNamed: this is the lane of the link now; the one before it is closed (P-9)."""
        assert self.state is State.NAMED
        if not self.dialled:
            self._control.append(control_frame(T.WELCOME, self._hello.to_map()))
        self.state = State.OPEN
        self._next_ping = now
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

    def close(self, reason: str) -> None:
        """End the lane and tell the peer why; `next_control` has the last frames.

        Entries of the board that were not written yet go first: they may say why, too.
        """
        boards = []
        while self.state is State.OPEN and self._to_publish:
            boards.append(self._board_frame())
        self._end(reason, *boards, control_frame(T.CLOSE, {"reason": reason[:MAX_REASON_CHARS]}))

    def connection_lost(self, reason: str) -> None:
        """The connection ended without CLOSE."""
        self._end(reason)

    def handle_timer(self, *, now: float) -> None:
        """Send a ping that is due; close a lane that is silent or never finished its handshake."""
        if self.state is State.CLOSED:
            return
        if self.state is not State.OPEN:
            if now >= self._deadline:
                self.close(f"no handshake within {HANDSHAKE_S:g} s ({self.state.value})")
            return
        if self._pings and now - self._pings[0][1] >= self._settings.silent_s:
            self.close(f"ping timeout: silent for {now - self._pings[0][1]:.1f} s")
        elif now >= self._next_ping:
            self._num_pings += 1
            self._pings.append((self._num_pings, now))
            self._control.append(control_frame(T.PING, seq=self._num_pings))
            self._next_ping = now + self._settings.ping_interval_s

    # Out -----------------------------------------------------------------------------------------

    def next_control(self) -> bytes | None:
        """The next whole frame to write, other than chunks, or None; goes ahead of bulk (P-10)."""
        if self._control:
            return self._control.popleft()
        if self.state is not State.OPEN:
            return None
        if self._pong is not None:
            number, self._pong = self._pong, None
            return control_frame(T.PONG, seq=number)
        if self._to_publish:
            return self._board_frame()
        return self._session.next_control()

    def events_received(self) -> list[Event]:
        events, self._events = self._events, []
        if self.state is State.OPEN:
            events.extend(self._session.events_received())
        return events

    def get_timer(self) -> float | None:
        """When `handle_timer` is due next."""
        if self.state is State.CLOSED:
            return None
        if self.state is not State.OPEN:
            return self._deadline
        if self._pings:
            return min(self._next_ping, self._pings[0][1] + self._settings.silent_s)
        return self._next_ping

    # Frames --------------------------------------------------------------------------------------

    def _place(self, header: FrameHeader) -> memoryview | None:
        self._transition(header.type)
        if header.type is not T.CHUNK:
            return memoryview(bytearray(header.payload_length))
        target = self._session.place(header)
        if target is None or header.coding == RAW:
            return target
        return memoryview(bytearray(header.payload_length))

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

    def _record(self, payload: memoryview) -> dict[Any, Any]:
        return unpack(payload, MAX_CONTROL_BYTES)

    def _on_hello(self, header: FrameHeader, payload: memoryview) -> None:
        try:
            theirs = Hello.from_map(self._record(payload))
        except ValueError as exc:
            raise ProtocolError(f"{header.type.name}: {exc}") from exc
        refusal = disagreement(self._hello, theirs)
        if refusal is None:
            self._events.append(PeerNamed(boot=theirs.boot, index=theirs.index))
            return
        reason, differing = refusal
        record = {"reason": reason, "differing": [list(row) for row in differing]}
        self._refused(reason, differing, control_frame(T.REFUSE, record))

    def _on_refuse(self, header: FrameHeader, payload: memoryview) -> None:
        try:
            reason, differing = read_refusal(self._record(payload))
        except ValueError as exc:
            raise ProtocolError(f"REFUSE: {exc}") from exc
        self._refused(reason, differing, None)

    def _on_close(self, header: FrameHeader, payload: memoryview) -> None:
        try:
            reason = get_str(self._record(payload), "reason")[:MAX_REASON_CHARS]
        except ValueError as exc:
            raise ProtocolError(f"CLOSE: {exc}") from exc
        self._end(f"closed by the other side: {reason}")

    def _on_board(self, header: FrameHeader, payload: memoryview) -> None:
        try:
            items = get_list(self._record(payload), "entries")
            if not all(isinstance(item, dict) for item in items):
                raise ValueError("entries must be maps")
            entries = tuple(Presence.from_map(item) for item in items)
        except ValueError as exc:
            raise ProtocolError(f"BOARD: {exc}") from exc
        self._events.append(BoardReceived(entries=entries))

    def _on_session(self, header: FrameHeader, payload: memoryview) -> None:
        self._session.receive(header, payload)

    def _on_chunk(self, frame: Frame) -> None:
        header, payload, intact = frame
        if payload is None:
            return
        if header.coding == RAW:
            self._session.finish_chunk(header, ok=intact)
            return
        # The view may have changed since the header, so the place is asked for again.
        target = self._session.place(header)
        if target is not None:
            self._session.mark_pending(header)
            self._events.append(CodedChunk(header=header, coded=payload, target=target))

    def _on_ping(self, header: FrameHeader, payload: memoryview) -> None:
        # One answer for all pings so far, so that a flood of them holds no memory.
        self._pong = header.seq

    def _on_pong(self, header: FrameHeader, payload: memoryview) -> None:
        if not self._pings or header.seq > self._pings[-1][0]:
            return
        while self._pings and self._pings[0][0] <= header.seq:
            number, sent = self._pings.popleft()
            if number == header.seq:
                self._rtt.on_sample(self._now - sent)

    def _board_frame(self) -> bytes:
        entries: list[dict[str, Any]] = []
        room = MAX_BOARD_BYTES
        while self._to_publish and room > 0:
            region = next(iter(self._to_publish))
            entries.append(self._to_publish.pop(region).to_map())
            room -= len(pack(entries[-1]))
        return control_frame(T.BOARD, {"entries": entries})

    def _refused(self, reason: str, differing: Differing, answer: bytes | None) -> None:
        self._events.append(PeerRefused(reason=reason, differing=differing))
        self._end(f"refused: {reason}", *([answer] if answer is not None else []))

    def _end(self, reason: str, *last_frames: bytes) -> None:
        if self.state is State.CLOSED:
            return
        events = self.events_received()
        if self.state is State.OPEN:
            self._session.lane_down()
        self.state = State.CLOSED
        self.close_reason = reason
        self._reader.discard()
        self._control.clear()
        self.says_why = bool(last_frames)
        self._control.extend(last_frames)
        self._events = [*events, LaneClosed(reason=reason)]
