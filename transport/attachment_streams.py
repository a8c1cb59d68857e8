"""The outgoing streams of one attachment, as the rank sees them: slots, credit, sequence numbers.

Everything here is called by the training thread and by the attachment's I/O thread, under the
attachment's lock. Nothing here waits: a stream says whether a message fits, and then takes it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from geotrain.transport.arena import PAGE_BYTES
from geotrain.transport.attachment_times import MAX_TIMES, Passage
from geotrain.transport.flow import MAX_UNRELEASED, Ring, aligned
from geotrain.transport.messages import Message
from geotrain.transport.restoring import RestoredOut

Post = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _Slot:
    start: int
    """In our own out-ring."""
    mirror_start: int
    """In the mirror of the peer's in-ring."""
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class _Sent:
    message: Message
    slot: _Slot | None
    first_s: float
    """When the sender was done with the whole message: since then it is on its way."""


class OutStream:
    """Sends the messages of one stream, each into a slot of its own ring.

    A slot stays taken, and its bytes must stay as they are, until the peer's *rank* has released
    the message: that acknowledgement is also the credit for the peer's ring, which `_mirror`
    follows.
    """

    def __init__(
        self, *, stream: int, memory: memoryview, lock: threading.RLock, post: Post
    ) -> None:
        self.stream = stream
        self.capacity = len(memory)
        self.max_part_bytes = max(PAGE_BYTES, self.capacity // 4)
        self.wire_bytes = 0
        self._passages: deque[Passage] = deque(maxlen=MAX_TIMES)
        self._first_s = 0.0
        self._memory = memory
        self._lock = lock
        self._post = post
        self._view = 0
        self._next_seq = 0
        self._ring = Ring(self.capacity)
        self._mirror = Ring(self.capacity)
        self._reserved: deque[_Slot] = deque()
        self._sent: dict[int, _Sent] = {}
        self._peer_cursor = 0
        """Of the mirror after the last message sent; reservations may be ahead of it."""

    def open(self, view: int, peer_capacity: int) -> None:
        """Forget everything of older views and start at sequence number 0."""
        with self._lock:
            self._view = view
            self._next_seq = 0
            self._ring = Ring(self.capacity)
            self._mirror = Ring(peer_capacity)
            self.max_part_bytes = max(PAGE_BYTES, min(self.capacity, peer_capacity) // 4)
            self._reserved.clear()
            self._sent.clear()
            self._peer_cursor = 0

    def kept(self, view: int, peer_capacity: int) -> RestoredOut:
        """What a new daemon must know to go on with `view`; under the lock.

        Args:
            peer_capacity: Of a view that is not open here yet, in which nothing was sent.
        """
        if view != self._view:
            return RestoredOut(
                num_sent=0, peer_capacity=peer_capacity, peer_cursor=0, unreleased=()
            )
        return RestoredOut(
            num_sent=self._next_seq,
            peer_capacity=self._mirror.capacity,
            peer_cursor=self._peer_cursor,
            unreleased=[
                (sent.message, sent.slot.mirror_start if sent.slot is not None else 0)
                for sent in self._sent.values()
            ],
        )

    def close(self) -> None:
        """Let go of the arena, so that it can be unmapped."""
        self._memory = memoryview(b"")

    def slots(self, nbytes: int) -> int:
        """How many messages with a payload of `nbytes` may be unacknowledged at once."""
        size = aligned(max(1, nbytes))
        return max(1, min(MAX_UNRELEASED, self.capacity // size, self._mirror.capacity // size))

    @property
    def view(self) -> int:
        """The open view; 0 before the first."""
        return self._view

    @property
    def unacknowledged(self) -> int:
        """Messages sent and not yet released by the peer's rank."""
        return len(self._sent)

    def unacknowledged_of(self, kind: str) -> int:
        with self._lock:
            return sum(sent.message.kind == kind for sent in self._sent.values())

    def fits(self, nbytes: int, *, count: int = 1) -> bool:
        """Whether `count` messages of `nbytes` each (0: none, or inline) may be sent now."""
        with self._lock:
            if self._view == 0 or len(self._sent) + len(self._reserved) + count > MAX_UNRELEASED:
                return False
            wanted = (count - 1) * aligned(nbytes) + nbytes
            return nbytes == 0 or (self._ring.fits(wanted) and self._mirror.fits(wanted))

    def reserve(self, nbytes: int) -> tuple[int, memoryview]:
        """Take a slot, after `fits` said yes; fill the view, then `send` with the same size.

        Slots are sent in the order in which they were reserved.
        """
        with self._lock:
            assert nbytes > 0 and self.fits(nbytes), "reserve() without fits()"
            start = self._ring.allocate(nbytes)
            slot = _Slot(start, self._mirror.allocate(nbytes), nbytes)
            self._reserved.append(slot)
            return start, self._memory[start : start + nbytes]

    def send(
        self,
        *,
        kind: str,
        step: int,
        microbatch: int,
        part: int = 0,
        num_parts: int = 1,
        header: bytes = b"",
        start: int = 0,
        payload_bytes: int = 0,
        inline: bytes = b"",
        hints: tuple[tuple[int, int], ...] = (),
        packed_s: float = 0.0,
    ) -> None:
        """Hand one message to the daemon, or to the next one if it is gone; never waits.

        Args:
            packed_s: How long it was being packed while its sender went on: a part of its passage.

        Raises:
            AttachError: The daemon is gone for good.
        """
        with self._lock:
            assert self._view != 0, "send() before open_view()"
            message = Message(
                stream=self.stream,
                view=self._view,
                seq=self._next_seq,
                kind=kind,
                step=step,
                microbatch=microbatch,
                part=part,
                num_parts=num_parts,
                header=header,
                payload_bytes=payload_bytes,
                start=start,
                inline=inline,
                hints=hints,
            )
            slot = self._take_reserved(start, payload_bytes) if payload_bytes else None
            if part == 0:
                self._first_s = time.monotonic() - packed_s
            self._sent[self._next_seq] = _Sent(message, slot, self._first_s)
            if slot is not None:
                self._peer_cursor = aligned(slot.mirror_start + slot.payload_bytes)
            self._next_seq += 1
            self._post({"type": "send", "message": message.to_map(with_start=True)})

    def _take_reserved(self, start: int, payload_bytes: int) -> _Slot:
        slot = self._reserved.popleft()
        assert (slot.start, slot.payload_bytes) == (start, payload_bytes), (
            "slots are sent whole and in the order reserved"
        )
        return slot

    def on_acked(self, view: int, seqs: list[int], wire_bytes: list[int]) -> None:
        """The peer's rank released these messages; from the I/O thread, under the lock."""
        if view != self._view:
            return
        self.wire_bytes += sum(wire_bytes)
        now = time.monotonic()
        for seq in seqs:
            sent = self._sent.pop(seq, None)
            if sent is None:
                continue
            if sent.slot is not None:
                self._ring.free(sent.slot.start)
                self._mirror.free(sent.slot.mirror_start)
            whole = sent.message
            if whole.part == whole.num_parts - 1:
                self._passages.append(
                    Passage(whole.kind, whole.step, whole.microbatch, sent.first_s, now)
                )

    def take_passages(self) -> list[Passage]:
        """The messages acknowledged since this was last asked, in that order."""
        with self._lock:
            passages = list(self._passages)
            self._passages.clear()
            return passages
