"""The receiving end of one stream: slots for headers, places for chunks, delivery in order.

Pure, but for the ring memory that the chunks are written into. It outlives lanes.
"""

from collections.abc import Sequence
from dataclasses import replace

from geotrain.transport.flow import MAX_UNRELEASED, Ring
from geotrain.transport.frame import MAX_MESSAGE_BYTES, FrameHeader, ProtocolError
from geotrain.transport.maps import unpack
from geotrain.transport.messages import Message
from geotrain.transport.reader import HOLD, Place
from geotrain.transport.reassembly import Incoming, Ranges
from geotrain.transport.restoring import RestoredIn
from geotrain.transport.sending import StreamState

MAX_CHECKSUM_FAILURES = 3
"""The chunk is asked for again after the first two; the third fails the view (P-12)."""
MAX_RESUME_RANGES = 1_024
"""Byte ranges told in a RESUME; what is left out comes twice and is dropped."""


class ReceiveStream:
    """Messages in sequence order; see the module."""

    def __init__(self, *, stream: int, memory: memoryview) -> None:
        """
        Args:
            memory: The in-ring of this region's rank for this stream, writable bytes.
        """
        self.stream = stream
        self.ring = Ring(memory.nbytes)
        self._memory = memory
        self._live: dict[int, Incoming] = {}
        self._expected = 0
        self._next_delivery = 0
        self._released = Ranges()

    @classmethod
    def restored(cls, *, stream: int, memory: memoryview, past: RestoredIn) -> "ReceiveStream":
        """As the rank has it, for a daemon that knows nothing of the view (R-1).

        What had arrived of messages that were not yet delivered is asked for again.

        Raises:
            ValueError: What the rank says contradicts itself.
        """
        restored = cls(stream=stream, memory=memory)
        slots = [(m.start, m.payload_bytes) for m in past.held if m.payload_bytes]
        restored.ring = Ring.restored(memory.nbytes, cursor=past.cursor, slots=slots)
        restored._expected = restored._next_delivery = past.num_delivered
        restored._released.add(0, past.num_delivered)
        for message in past.held:
            incoming = Incoming(message)
            incoming.received.add(0, message.payload_bytes)
            restored._live[message.seq] = incoming
            restored._released.remove(message.seq, message.seq + 1)
        return restored

    def receive_message(self, message: Message) -> None:
        """A header arrived: reserve its slot.

        Raises:
            ProtocolError: Out of sequence or without credit (P-7).
        """
        place = f"message {message.seq} of stream {self.stream}"
        if message.seq != self._expected:
            raise ProtocolError(f"{place}, expected {self._expected}")
        if len(self._live) >= MAX_UNRELEASED:
            raise ProtocolError(f"{place} without credit: {MAX_UNRELEASED} are not released")
        start = 0
        if message.payload_bytes:
            if not self.ring.fits(message.payload_bytes):
                raise ProtocolError(f"{place} without credit: no room for {message.payload_bytes}")
            start = self.ring.allocate(message.payload_bytes)
        self._expected += 1
        self._live[message.seq] = Incoming(replace(message, start=start))

    def place(self, header: FrameHeader) -> Place:
        """Where this chunk's raw bytes belong; until `finish`, `mark_pending` or `abandon` it is
        the only chunk that may have them (P-17).

        Returns:
            None where they have arrived before, HOLD where their message is not known yet.

        Raises:
            ProtocolError: A chunk outside its message, half known, or arriving on another lane.
        """
        incoming = self._live.get(header.seq)
        if incoming is None:
            return None if header.seq < self._expected else HOLD
        end = header.raw_offset + header.raw_length
        try:
            if not incoming.wants(header.raw_offset, end):
                return None
        except ValueError as exc:
            raise ProtocolError(f"CHUNK of message {header.seq}: {exc}") from exc
        incoming.arriving.add(header.raw_offset, end)
        return self._view(incoming, header)

    def mark_pending(self, header: FrameHeader) -> memoryview:
        """The placed chunk arrived, coded: a worker will write it to where this returns."""
        incoming = self._live[header.seq]
        end = header.raw_offset + header.raw_length
        incoming.arriving.remove(header.raw_offset, end)
        incoming.pending.add(header.raw_offset, end)
        return self._view(incoming, header)

    def abandon(self, header: FrameHeader) -> None:
        """The lane of the placed chunk is gone, and writes nothing any more."""
        end = header.raw_offset + header.raw_length
        self._live[header.seq].arriving.remove(header.raw_offset, end)

    def finish(self, header: FrameHeader, *, ok: bool) -> int:
        """The chunk is in its place and its checksum was compared.

        Returns:
            How often a chunk at this offset has failed; 0 where it is right.
        """
        incoming = self._live[header.seq]
        end = header.raw_offset + header.raw_length
        incoming.arriving.remove(header.raw_offset, end)
        incoming.pending.remove(header.raw_offset, end)
        if ok:
            incoming.received.add(header.raw_offset, end)
            return 0
        failures = incoming.failures.get(header.raw_offset, 0) + 1
        incoming.failures[header.raw_offset] = failures
        return failures

    def take_deliverable(self) -> list[Message]:
        """Messages that are whole and whose predecessors were delivered; each once (P-5)."""
        ready: list[Message] = []
        while (incoming := self._live.get(self._next_delivery)) is not None and incoming.complete:
            ready.append(incoming.message)
            self._next_delivery += 1
        return ready

    def release(self, seqs: Sequence[int]) -> None:
        """This region's rank is done with these.

        Raises:
            ValueError: Not delivered, or released before.
        """
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"stream {self.stream}: a message is released twice")
        for seq in seqs:
            if seq not in self._live or seq >= self._next_delivery:
                raise ValueError(f"stream {self.stream}: message {seq} is not held by the rank")
        for seq in seqs:
            message = self._live.pop(seq).message
            if message.payload_bytes:
                self.ring.free(message.start)
            self._released.add(seq, seq + 1)

    def state(self) -> StreamState:
        """What the sender must know to continue on a new lane."""
        room = MAX_RESUME_RANGES
        incomplete: dict[int, Ranges] = {}
        for seq, incoming in self._live.items():
            arrived = incoming.arrived()
            if arrived.covers(0, incoming.message.payload_bytes):
                continue
            if incoming.message.payload_bytes:
                told = Ranges(list(arrived)[:room])
                room -= len(told)
                incomplete[seq] = told
        return StreamState(
            expected=self._expected, released=Ranges(self._released), incomplete=incomplete
        )

    def _view(self, incoming: Incoming, header: FrameHeader) -> memoryview:
        start = incoming.message.start + header.raw_offset
        return self._memory[start : start + header.raw_length]


def read_message(header: FrameHeader, payload: memoryview) -> Message:
    """The message in a MESSAGE frame.

    Raises:
        ProtocolError: It is not one.
    """
    try:
        message = Message.from_map(unpack(payload, MAX_MESSAGE_BYTES))
    except ValueError as exc:
        raise ProtocolError(f"MESSAGE: {exc}") from exc
    if (message.stream, message.view, message.seq) != (header.stream, header.view, header.seq):
        raise ProtocolError("MESSAGE: the map contradicts the header")
    return message
