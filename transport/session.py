"""What two daemons owe each other in one view. It outlives lanes; pure, sans-I/O.

Inputs: `offer` and `release` from this side, `receive` and the chunk calls from the lane.
Outputs: `next_control` (whole frames), `next_raw` and `next_codable` (chunks), `events_received`.

A view's traffic flows on a lane only after both sides sent RESUME for that view on that lane (P-6):

    view open here | RESUME of it came | sent                 | taken
    no             | -                 | nothing              | chunks are drained, the rest dropped
    yes            | no                | RESUME once          | RESUME
    yes            | yes               | MESSAGE CHUNK ACK NAK| MESSAGE CHUNK ACK NAK
    failed         | -                 | nothing              | as where it is not open
"""

from collections import deque
from collections.abc import Mapping, Sequence

from geotrain.transport.bulk import BulkQueue, Chunk
from geotrain.transport.events import Acked, Delivered, SessionEvent, ViewFailed
from geotrain.transport.flow import MAX_UNRELEASED
from geotrain.transport.frame import (
    MAX_MESSAGE_BYTES,
    FrameHeader,
    FrameType,
    ProtocolError,
    control_frame,
    nak_frame,
)
from geotrain.transport.maps import get_list, is_int, unpack
from geotrain.transport.messages import Message
from geotrain.transport.receiving import MAX_CHECKSUM_FAILURES, ReceiveStream
from geotrain.transport.sending import (
    MAX_STREAMS,
    SendStream,
    StreamState,
    chunk_wire_bytes,
    read_states,
)


class Session:
    """The state of a link's streams; see the module."""

    def __init__(self) -> None:
        self.view = 0
        """The open view; 0 where none is."""
        self._sends: dict[int, SendStream] = {}
        self._receives: dict[int, ReceiveStream] = {}
        self._events: list[SessionEvent] = []
        self._lane_up = False
        self._peer_resume: tuple[int, dict[int, StreamState]] | None = None
        self._flowing = False
        self._control: deque[bytes] = deque()
        self._releases: dict[int, list[int]] = {}
        self._bulk = BulkQueue()
        self.messages_sent = 0
        self.messages_received = 0
        self.payload_bytes_sent = 0
        """Payload before coding, of all chunks written; what was sent again counts again."""

    # The view ------------------------------------------------------------------------------------

    def open_view(
        self, view: int, sends: Mapping[int, int], receives: Mapping[int, memoryview]
    ) -> None:
        """Start sequence numbers at 0.

        Args:
            sends: Stream -> capacity of the peer's in-ring in bytes.
            receives: Stream -> the memory of this region's in-ring.

        Raises:
            ValueError: More than MAX_STREAMS either way.
        """
        self._open(
            view,
            [SendStream(stream=n, view=view, capacity=size) for n, size in sends.items()],
            [ReceiveStream(stream=n, memory=memory) for n, memory in receives.items()],
        )

    def restore_view(
        self, view: int, sends: Sequence[SendStream], receives: Sequence[ReceiveStream]
    ) -> None:
        """Go on where a daemon before this one ended (R-1).

        Raises:
            ValueError: More than MAX_STREAMS either way.
        """
        self._open(view, sends, receives)

    def _open(
        self, view: int, sends: Sequence[SendStream], receives: Sequence[ReceiveStream]
    ) -> None:
        if max(len(sends), len(receives)) > MAX_STREAMS:
            raise ValueError(f"a link carries at most {MAX_STREAMS} streams each way")
        self.close_view()
        self.view = view
        self._sends = {stream.stream: stream for stream in sends}
        self._receives = {stream.stream: stream for stream in receives}
        if self._lane_up:
            self._begin_resume()

    def close_view(self) -> None:
        """Forget everything of the view; its memory is not touched afterwards (P-14)."""
        self.view = 0
        self._sends, self._receives = {}, {}
        self._drop_queued()

    def lane_up(self) -> None:
        """A lane is ready; the one before it is closed (P-9)."""
        assert not self._lane_up, "the old lane must be closed first"
        self._lane_up = True
        self._peer_resume = None
        if self.view:
            self._begin_resume()

    def lane_down(self) -> None:
        """The lane is gone: what was written to it may not have arrived."""
        self._lane_up = False
        self._peer_resume = None
        self._drop_queued()

    def offer(self, message: Message, payload: memoryview | None) -> None:
        """Take a message to the peer; of another view it is dropped.

        The payload must stay as it is until Acked.

        Raises:
            ValueError: An unknown stream, out of sequence, or larger than the peer's ring.
        """
        if message.view != self.view:
            return
        stream = self._sends.get(message.stream)
        if stream is None:
            raise ValueError(f"no stream {message.stream} goes over this link")
        stream.offer(message, payload)

    def release(self, stream: int, view: int, seqs: Sequence[int]) -> None:
        """This region's rank is done with delivered messages; of another view: nothing happens.

        Raises:
            ValueError: An unknown stream, or messages that the rank does not hold.
        """
        if view != self.view:
            return
        receive = self._receives.get(stream)
        if receive is None:
            raise ValueError(f"no stream {stream} comes over this link")
        receive.release(seqs)
        if self._lane_up:
            # P-8: credit goes back now, on release. Without a lane, RESUME will tell it.
            self._releases.setdefault(stream, []).extend(seqs)

    # From the lane -------------------------------------------------------------------------------

    def receive(self, header: FrameHeader, payload: memoryview) -> None:
        """A whole RESUME, MESSAGE, ACK or NAK whose checksum is right.

        Raises:
            ProtocolError: It breaks a rule; the lane must close.
        """
        if header.type is FrameType.RESUME:
            self._receive_resume(header, payload)
        elif header.view != self.view:
            return
        elif header.type is FrameType.MESSAGE:
            self._receive_message(header, payload)
        elif header.type is FrameType.ACK:
            self._receive_ack(header, payload)
        else:
            self._receive_nak(header)

    def place(self, header: FrameHeader) -> memoryview | None:
        """Where the raw bytes of a CHUNK belong; None: drain it, it is old or known (P-6).

        Raises:
            ProtocolError: It belongs nowhere.
        """
        if header.view != self.view:
            return None
        return self._receive_stream(header).place(header)

    def mark_pending(self, header: FrameHeader) -> None:
        """The coded bytes of a placed chunk arrived whole and go to a worker."""
        self._receive_stream(header).mark_pending(header)

    def finish_chunk(self, header: FrameHeader, *, ok: bool) -> None:
        """A chunk is in its place, and its checksum was right or not; of an old view: ignored."""
        if header.view != self.view:
            return
        stream = self._receive_stream(header)
        failures = stream.finish(header, ok=ok)
        if ok:
            self._deliver(stream)
        elif failures >= MAX_CHECKSUM_FAILURES:
            self._fail(
                f"the chunk at {header.raw_offset} of message {header.seq} of stream "
                f"{header.stream} failed its checksum {failures} times"
            )
        elif self._lane_up:
            # P-12: asked for again, and it will come raw, so a faulty coder is ruled out too.
            self._control.append(nak_frame(header))

    # To the lane ---------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Whether receiving led to an event or an answer."""
        return bool(self._events or self._control)

    def next_control(self) -> bytes | None:
        """The next frame that is not a chunk; control goes ahead of bulk (P-10)."""
        if self._control:
            return self._control.popleft()
        if self._releases:
            return self._ack_frame()
        if not self._flowing:
            return None
        for stream in self._sends.values():
            started = stream.num_started
            found = stream.next_header()
            if found is not None:
                frame, outgoing = found
                self.messages_sent += stream.num_started - started
                self._bulk.push(outgoing)
                return frame
        return None

    def next_raw(self, limit: int) -> Chunk | None:
        """Cut the next chunk to send as it is, at most `limit` bytes, oldest microbatch first."""
        return self._bulk.next_raw(limit) if self._flowing else None

    @property
    def has_codable(self) -> bool:
        return self._flowing and self._bulk.has_codable

    def next_codable(self, limit: int) -> Chunk | None:
        """Cut the next chunk for the coder; whatever the coder says, it must be sent afterwards."""
        return self._bulk.next_codable(limit) if self._flowing else None

    def is_current(self, chunk: Chunk) -> bool:
        """Whether a chunk cut earlier may still be written."""
        return self._flowing and chunk.view == self.view and self._bulk.is_current(chunk)

    def chunk_written(self, chunk: Chunk, *, payload_length: int) -> None:
        """The current chunk was handed to the lane, header and all."""
        outgoing = self._sends[chunk.stream].live[chunk.seq]
        outgoing.unsent_bytes -= chunk.raw.nbytes
        self.payload_bytes_sent += chunk.raw.nbytes
        outgoing.wire_bytes += chunk_wire_bytes(payload_length)

    def events_received(self) -> list[SessionEvent]:
        events, self._events = self._events, []
        return events

    def _begin_resume(self) -> None:
        # P-9: a snapshot; what was released before the lane came up needs no ACK beside it.
        self._control.append(
            control_frame(
                FrameType.RESUME,
                {"streams": {n: s.state().to_map() for n, s in self._receives.items()}},
                view=self.view,
            )
        )
        self._apply_resume()

    def _receive_resume(self, header: FrameHeader, payload: memoryview) -> None:
        if header.view == 0 or (self._peer_resume and self._peer_resume[0] == header.view):
            raise ProtocolError("RESUME twice for one view on one lane, or for none")
        try:
            states = read_states(unpack(payload, payload.nbytes))
        except ValueError as exc:
            raise ProtocolError(f"RESUME: {exc}") from exc
        self._peer_resume = (header.view, states)
        # The peer left our view for another: what we would still send it would only drain.
        self._flowing = False
        self._apply_resume()

    def _apply_resume(self) -> None:
        if self._peer_resume is None or self._peer_resume[0] != self.view:
            return
        states = self._peer_resume[1]
        if set(states) != set(self._sends):
            self._fail(f"the peer takes streams {sorted(states)}, not {sorted(self._sends)}")
            return
        for number, stream in self._sends.items():
            try:
                seqs, wire_bytes = stream.resume(states[number])
            except ValueError as exc:
                # On another lane the peer would tell the same, so the view ends, not the lane.
                self._fail(str(exc))
                return
            self._acked(number, seqs, wire_bytes)
            for outgoing in stream.live.values():
                self._bulk.push(outgoing)
        self._flowing = True

    def _receive_message(self, header: FrameHeader, payload: memoryview) -> None:
        stream = self._receive_stream(header)
        try:
            message = Message.from_map(unpack(payload, MAX_MESSAGE_BYTES))
        except ValueError as exc:
            raise ProtocolError(f"MESSAGE: {exc}") from exc
        if (message.stream, message.view, message.seq) != (header.stream, header.view, header.seq):
            raise ProtocolError("MESSAGE: the map contradicts the header")
        stream.receive_message(message)
        self.messages_received += 1
        self._deliver(stream)

    def _receive_ack(self, header: FrameHeader, payload: memoryview) -> None:
        stream = self._send_stream(header)
        try:
            seqs = get_list(unpack(payload, payload.nbytes), "seqs")
        except ValueError as exc:
            raise ProtocolError(f"ACK: {exc}") from exc
        if not all(is_int(seq) for seq in seqs):
            raise ProtocolError("ACK: seqs must be integers")
        self._acked(header.stream, seqs, stream.acknowledge(seqs))

    def _receive_nak(self, header: FrameHeader) -> None:
        end = header.raw_offset + header.raw_length
        outgoing = self._send_stream(header).want_again(header.seq, header.raw_offset, end)
        self._bulk.push(outgoing)

    def _send_stream(self, header: FrameHeader) -> SendStream:
        # Not flowing: what it is about was sent before the peer's RESUME, on this lane impossible.
        stream = self._sends.get(header.stream) if self._flowing else None
        if stream is None:
            raise ProtocolError(f"{header.type.name} of stream {header.stream}, which is not sent")
        return stream

    def _receive_stream(self, header: FrameHeader) -> ReceiveStream:
        stream = self._receives.get(header.stream)
        if stream is None:
            raise ProtocolError(f"{header.type.name} of stream {header.stream}, not received here")
        return stream

    def _deliver(self, stream: ReceiveStream) -> None:
        self._events.extend(Delivered(message=message) for message in stream.take_deliverable())

    def _acked(self, stream: int, seqs: list[int], wire_bytes: list[int]) -> None:
        if seqs:
            self._events.append(
                Acked(stream=stream, view=self.view, seqs=seqs, wire_bytes=wire_bytes)
            )

    def _ack_frame(self) -> bytes:
        stream, seqs = next(iter(self._releases.items()))
        told, rest = seqs[:MAX_UNRELEASED], seqs[MAX_UNRELEASED:]
        if rest:
            self._releases[stream] = rest
        else:
            del self._releases[stream]
        return control_frame(FrameType.ACK, {"seqs": told}, stream=stream, view=self.view)

    def _drop_queued(self) -> None:
        self._flowing = False
        self._control.clear()
        self._releases.clear()
        self._bulk.clear()

    def _fail(self, reason: str) -> None:
        self._events.append(ViewFailed(view=self.view, reason=reason))
        self.close_view()
