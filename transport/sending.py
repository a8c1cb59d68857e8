"""The sending end of one stream: what is offered, what has credit, what is not yet released.

Pure. It outlives lanes: after a reconnect `resume` compares with what the peer has and queues
the rest.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geotrain.transport.flow import MAX_UNRELEASED, Ring
from geotrain.transport.frame import HEADER_BYTES, FrameType, ProtocolError, control_frame
from geotrain.transport.maps import MAX_ITEMS, get_int, get_list, get_map, get_pairs, is_int, unpack
from geotrain.transport.messages import MAX_COUNT, Message
from geotrain.transport.reassembly import Ranges
from geotrain.transport.restoring import RestoredOut

MAX_STREAMS = 4
"""Streams of one link in each direction: bounds the size of a RESUME."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """What a receiver has of one stream, as RESUME tells it."""

    expected: int
    """The next sequence number whose header has not arrived."""
    released: Ranges
    """Sequence numbers its rank has released."""
    incomplete: Mapping[int, Ranges]
    """Sequence number -> byte ranges that have arrived, of each message not yet whole."""

    def to_map(self) -> dict[str, Any]:
        return {
            "expected": self.expected,
            "released": [[start, end] for start, end in self.released],
            "incomplete": [
                [seq, [[start, end] for start, end in arrived]]
                for seq, arrived in self.incomplete.items()
            ],
        }

    @classmethod
    def from_map(cls, record: Any) -> "StreamState":
        """
        Raises:
            ValueError: Not such a map, or its numbers contradict each other.
        """
        if not isinstance(record, dict):
            raise ValueError("a stream's state must be a map")
        expected = get_int(record, "expected")
        if not 0 <= expected <= MAX_COUNT:
            raise ValueError(f"expected: {expected}")
        incomplete: dict[int, Ranges] = {}
        for item in get_list(record, "incomplete", []):
            if not (isinstance(item, list) and len(item) == 2 and is_int(item[0])):
                raise ValueError("incomplete: must be pairs of a number and ranges")
            if not 0 <= item[0] < expected:
                raise ValueError(f"incomplete: {item[0]} is not below {expected}")
            incomplete[item[0]] = _ranges({"ranges": item[1]}, "ranges", MAX_COUNT)
        return cls(
            expected=expected,
            released=_ranges(record, "released", expected),
            incomplete=incomplete,
        )


def read_ack(payload: memoryview) -> list[int]:
    """The sequence numbers in an ACK's payload.

    Raises:
        ProtocolError: It is not one.
    """
    try:
        seqs = get_list(unpack(payload, payload.nbytes), "seqs")
    except ValueError as exc:
        raise ProtocolError(f"ACK: {exc}") from exc
    if not all(is_int(seq) for seq in seqs):
        raise ProtocolError("ACK: seqs must be integers")
    return seqs


def read_states(kind: FrameType, payload: memoryview) -> dict[int, StreamState]:
    """The payload of a RESUME or GONE: stream -> its state.

    Raises:
        ProtocolError: It is not one.
    """
    try:
        streams = get_map(unpack(payload, payload.nbytes), "streams") or {}
        if len(streams) > MAX_STREAMS or not all(is_int(stream) for stream in streams):
            raise ValueError(f"streams: at most {MAX_STREAMS} numbers")
        return {stream: StreamState.from_map(state) for stream, state in streams.items()}
    except ValueError as exc:
        raise ProtocolError(f"{kind.name}: {exc}") from exc


def _ranges(record: Mapping[Any, Any], key: str, limit: int) -> Ranges:
    ranges = Ranges()
    for start, end in get_pairs(record, key, MAX_ITEMS):
        if not 0 <= start < end <= limit:
            raise ValueError(f"{key}: {start}..{end} is not within {limit}")
        ranges.add(start, end)
    return ranges


class Outgoing:
    """One message on its way, until the peer's rank has released it."""

    __slots__ = (
        *("codable", "message", "payload", "raw", "slot", "unsent_bytes", "wire_bytes"),
        "written",
    )

    def __init__(self, message: Message, payload: memoryview | None) -> None:
        self.message = message
        self.payload = payload
        self.slot: int | None = None
        """Where the mirror says the receiver's slot begins."""
        self.raw = Ranges()
        """Still to be sent as it is."""
        self.codable = Ranges()
        """Still to be offered to the coder."""
        self.unsent_bytes = 0
        """Not yet written to a lane, whether queued here, at the coder or coded."""
        self.wire_bytes = 0
        self.written: dict[int, Ranges] = {}
        """Lane -> what of the payload was last written there: what dies with it (P-18)."""

    def queue_missing(self, missing: Ranges) -> None:
        """Send these ranges of the payload, and only these."""
        self.written.clear()
        self.raw, self.codable = Ranges(missing), Ranges()
        self.unsent_bytes = missing.total
        for offset, length in self.message.hints:
            for start, end in missing:
                low, high = max(start, offset), min(end, offset + length)
                if low < high:
                    self.raw.remove(low, high)
                    self.codable.add(low, high)

    def wrote(self, lane: int, start: int, end: int) -> None:
        """A chunk went to a lane, header and all."""
        self.unsent_bytes -= end - start
        self.written.setdefault(lane, Ranges()).add(start, end)

    def send_again(self, start: int, end: int) -> None:
        """Queue a range that was written before, raw; it is on no lane any more."""
        for ranges in self.written.values():
            ranges.remove(start, end)
        self.raw.add(start, end)
        self.unsent_bytes += end - start


class SendStream:
    """Messages in sequence order; see the module."""

    def __init__(self, *, stream: int, view: int, capacity: int) -> None:
        self.stream = stream
        self.view = view
        self.mirror = Ring(capacity)
        self.live: dict[int, Outgoing] = {}
        """Header sent at least once, not released by the peer's rank; in sequence order."""
        self._waiting: deque[Outgoing] = deque()
        self._resend: deque[Outgoing] = deque()
        self._acked = Ranges()
        self._num_offered = 0

    @classmethod
    def restored(
        cls,
        *,
        stream: int,
        view: int,
        past: RestoredOut,
        payload: Callable[[Message], memoryview | None],
    ) -> "SendStream":
        """As the rank has it, for a daemon that knows nothing of the view (R-1).

        Nothing is sent before `resume` has told what the peer has.

        Raises:
            ValueError: What the rank says contradicts itself.
        """
        restored = cls(stream=stream, view=view, capacity=past.peer_capacity)
        slots = [(slot, m.payload_bytes) for m, slot in past.unreleased if m.payload_bytes]
        restored.mirror = Ring.restored(past.peer_capacity, cursor=past.peer_cursor, slots=slots)
        restored._num_offered = past.num_sent
        restored._acked.add(0, past.num_sent)
        for message, slot in past.unreleased:
            outgoing = Outgoing(message, payload(message))
            outgoing.slot = slot if message.payload_bytes else None
            restored.live[message.seq] = outgoing
            restored._acked.remove(message.seq, message.seq + 1)
        return restored

    @property
    def num_started(self) -> int:
        """Messages whose slot the mirror has given; the next header has this number."""
        return self._num_offered - len(self._waiting)

    def offer(self, message: Message, payload: memoryview | None) -> None:
        """
        Raises:
            ValueError: Out of sequence, or larger than the peer's ring can ever hold.
        """
        if message.seq != self._num_offered:
            raise ValueError(
                f"stream {self.stream}: message {message.seq}, expected {self._num_offered}"
            )
        if message.payload_bytes > self.mirror.capacity:
            raise ValueError(
                f"stream {self.stream}: {message.payload_bytes} bytes, the peer's ring holds "
                f"{self.mirror.capacity}"
            )
        if (0 if payload is None else payload.nbytes) != message.payload_bytes:
            raise ValueError(f"stream {self.stream}: the payload is not payload_bytes long")
        self._num_offered += 1
        self._waiting.append(Outgoing(message, payload))

    def next_header(self) -> tuple[bytes, Outgoing] | None:
        """The next MESSAGE frame that may be sent now, and whose it is."""
        if self._resend:
            outgoing = self._resend.popleft()
        elif self._waiting and self._has_credit(self._waiting[0].message.payload_bytes):
            outgoing = self._waiting.popleft()
            message = outgoing.message
            if message.payload_bytes:
                outgoing.slot = self.mirror.allocate(message.payload_bytes)
                outgoing.queue_missing(Ranges([(0, message.payload_bytes)]))
            self.live[message.seq] = outgoing
        else:
            return None
        message = outgoing.message
        frame = control_frame(
            FrameType.MESSAGE,
            message.to_map(),
            stream=message.stream,
            view=message.view,
            seq=message.seq,
        )
        outgoing.wire_bytes += len(frame)
        return frame, outgoing

    def acknowledge(self, seqs: Sequence[int]) -> list[int]:
        """The peer's rank has released these; returns the wire bytes of each.

        Raises:
            ProtocolError: Never sent whole, or acknowledged before.
        """
        for seq in seqs:
            outgoing = self.live.get(seq)
            if outgoing is None or outgoing.unsent_bytes or outgoing in self._resend:
                raise ProtocolError(f"ACK of message {seq} of stream {self.stream}, not out")
        if len(set(seqs)) != len(seqs):
            raise ProtocolError(f"ACK names a message of stream {self.stream} twice")
        return [self._forget(seq) for seq in seqs]

    def want_again(self, seq: int, start: int, end: int) -> Outgoing:
        """The peer could not verify this range: queue it again, raw.

        Raises:
            ProtocolError: Not a range that has been sent.
        """
        outgoing = self.live.get(seq)
        if (
            outgoing is None
            or not 0 <= start < end <= outgoing.message.payload_bytes
            or outgoing.raw.overlaps(start, end)
            or outgoing.codable.overlaps(start, end)
        ):
            raise ProtocolError(f"NAK of {start}..{end} of message {seq}, which is not out")
        outgoing.send_again(start, end)
        return outgoing

    def lane_gone(self, lane: int, state: StreamState) -> list[Outgoing]:
        """Queue again what was written to a lane that died and has not arrived (P-18).

        Args:
            state: What the peer had when nothing from that lane could arrive any more.

        Returns:
            The messages of which something was queued.

        Raises:
            ProtocolError: The peer claims what was never sent.
        """
        if state.expected > self.num_started:
            raise ProtocolError(f"GONE: message {state.expected} of stream {self.stream}, not out")
        incomplete = []
        for seq, outgoing in self.live.items():
            lost = outgoing.written.pop(lane, None)
            if lost is None:
                continue
            if seq in state.incomplete:
                for start, end in state.incomplete[seq]:
                    lost.remove(start, end)
            elif seq < state.expected:
                continue  # It is whole there.
            for start, end in lost:
                outgoing.send_again(start, end)
            if len(lost):
                incomplete.append(outgoing)
        return incomplete

    def resume(self, state: StreamState) -> tuple[list[int], list[int]]:
        """Continue from what the peer has; returns what it released meanwhile, as in an ACK.

        Raises:
            ValueError: The peer claims what was never sent, or no longer has what it acknowledged:
                the view cannot go on.
        """
        if state.expected > self.num_started:
            raise ValueError(
                f"RESUME of stream {self.stream} expects message {state.expected}, "
                f"{self.num_started} were sent"
            )
        if not all(state.released.covers(start, end) for start, end in self._acked):
            raise ValueError("the peer lost the state of this view: its daemon restarted")
        released = [seq for seq in self.live if state.released.covers(seq, seq + 1)]
        wire_bytes = [self._forget(seq) for seq in released]
        self._resend.clear()
        for seq, outgoing in self.live.items():
            size = outgoing.message.payload_bytes
            if seq >= state.expected:
                self._resend.append(outgoing)
                missing = Ranges([(0, size)])
            elif seq in state.incomplete:
                missing = state.incomplete[seq].missing(size)
            else:
                missing = Ranges()
            outgoing.queue_missing(missing)
        return released, wire_bytes

    def _has_credit(self, payload_bytes: int) -> bool:
        # P-7: the mirror and the number of unreleased messages are all the credit there is.
        if len(self.live) >= MAX_UNRELEASED:
            return False
        return payload_bytes == 0 or self.mirror.fits(payload_bytes)

    def _forget(self, seq: int) -> int:
        outgoing = self.live.pop(seq)
        if outgoing.slot is not None:
            self.mirror.free(outgoing.slot)
        self._acked.add(seq, seq + 1)
        return outgoing.wire_bytes


def chunk_wire_bytes(payload_length: int) -> int:
    """What one chunk costs on the wire."""
    return HEADER_BYTES + payload_length
