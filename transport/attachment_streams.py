"""The streams of one attachment, as the rank sees them: slots, credit, sequence numbers.

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
from geotrain.transport.attachment_times import MAX_TIMES, Hold, Passage
from geotrain.transport.flow import MAX_UNRELEASED, Ring, aligned
from geotrain.transport.messages import Message
from geotrain.transport.restoring import RestoredIn, RestoredOut

Post = Callable[[Mapping[str, Any]], None]
OnExpected = Callable[[Message, memoryview], None]
"""Is told of an expected message and its payload."""


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
    """When the first part of the whole message was sent."""


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

    def fits(self, nbytes: int) -> bool:
        """Whether a message with a payload of `nbytes` (0: none, or inline) may be sent now."""
        with self._lock:
            if self._view == 0 or len(self._sent) + len(self._reserved) >= MAX_UNRELEASED:
                return False
            return nbytes == 0 or (self._ring.fits(nbytes) and self._mirror.fits(nbytes))

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
    ) -> None:
        """Hand one message to the daemon, or to the next one if it is gone; never waits.

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
                self._first_s = time.monotonic()
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


def _nothing(message: Message, payload: memoryview) -> None:
    """Where nothing is expected."""


@dataclass(slots=True)
class Received:
    """One delivered message. `payload` is the slot itself: copy it out before `release`."""

    message: Message
    payload: memoryview
    _release: Callable[[Message], None]
    came_s: float
    """When it came (monotonic), which may be long before it was taken."""
    _released: bool = False

    def release(self) -> None:
        """Give slot and credit back to the sender; exactly once, also where there is no slot."""
        assert not self._released, "a message released twice"
        self._released = True
        self.payload = memoryview(b"")
        self._release(self.message)


class InStream:
    """Receives the messages of one stream in sequence order."""

    def __init__(
        self, *, stream: int, memory: memoryview, lock: threading.RLock, post: Post
    ) -> None:
        self.stream = stream
        self.capacity = len(memory)
        self._memory = memory
        self._lock = lock
        self._post = post
        self._view = 0
        self._queue: deque[Message] = deque()
        self._early: deque[Message] = deque()
        self._delivered_view = 0
        """The view that the next three are about; it may be ahead of the one open here."""
        self._num_delivered = 0
        self._cursor = 0
        self._held: dict[int, Message] = {}
        self._came_s: dict[int, float] = {}
        """When each message of `_held` came."""
        self._holds: deque[Hold] = deque(maxlen=MAX_TIMES)
        self._expected: tuple[str, int, int] | None = None
        self._on_expected: OnExpected = _nothing

    def open(self, view: int) -> None:
        """Keep what came for this view already (a peer may open it first), drop the rest."""
        with self._lock:
            self._view = view
            came = [*self._queue, *self._early]
            self._queue = deque(message for message in came if message.view == view)
            self._early.clear()
            for message in came:
                if message.view != view:
                    self._release(message)

    def close(self) -> None:
        """Let go of the arena, so that it can be unmapped."""
        self._memory = memoryview(b"")

    def take(self) -> Received | None:
        """The next message, or None. Its owner must `release` it."""
        with self._lock:
            if not self._queue:
                return None
            message = self._queue.popleft()
            came_s = self._came_s.get(message.seq, time.monotonic())
        return Received(message, self._payload(message), self._release, came_s)

    def expect(self, kind: str, step: int, microbatch: int, then: OnExpected) -> None:
        """Call `then` once a message of one part is there, at once if it is; one at a time.

        It is called under the lock, often by the I/O thread, and may do no more than pass on what
        it is given: the message as `take` returns it, and its payload, which is right until the
        message is released.
        """
        with self._lock:
            self._expected, self._on_expected = (kind, step, microbatch), then
            for message in self._held.values():
                if message.view == self._view:
                    self._compare(message)

    def _compare(self, message: Message) -> None:
        key = (message.kind, message.step, message.microbatch)
        if key == self._expected and message.num_parts == 1:
            self._expected, then = None, self._on_expected
            then(message, self._payload(message))

    def _payload(self, message: Message) -> memoryview:
        if message.payload_bytes:
            return self._memory[message.start : message.start + message.payload_bytes]
        return memoryview(message.inline)

    @property
    def delivered_view(self) -> int:
        """The newest view of which a message came; 0 before the first."""
        return self._delivered_view

    def kept(self, view: int) -> RestoredIn:
        """What a new daemon must know to go on with `view`; under the lock."""
        if view != self._delivered_view:
            return RestoredIn(num_delivered=0, cursor=0, held=())
        return RestoredIn(
            num_delivered=self._num_delivered,
            cursor=self._cursor,
            held=[self._held[seq] for seq in sorted(self._held)],
        )

    def pending(self) -> int:
        """Messages of the open view that `take` would return now."""
        return len(self._queue)

    def on_delivered(self, message: Message, *, board_view: int) -> None:
        """A message came; from the I/O thread, under the lock.

        Args:
            board_view: The view that the board now stands for, which this rank may yet open.
        """
        if message.view != self._delivered_view:
            self._delivered_view = message.view
            self._num_delivered = self._cursor = 0
            self._held.clear()
            self._came_s.clear()
        self._num_delivered = message.seq + 1
        if message.payload_bytes:
            self._cursor = aligned(message.start + message.payload_bytes)
        self._held[message.seq] = message
        self._came_s[message.seq] = time.monotonic()
        if message.view == self._view:
            self._queue.append(message)
            self._compare(message)
        elif message.view == board_view:
            self._early.append(message)
        else:
            self._release(message)

    def _release(self, message: Message) -> None:
        # One step under the lock: a daemon that comes now must learn of it one way or the other.
        with self._lock:
            if message.view == self._delivered_view:
                self._held.pop(message.seq, None)
                self._note_hold(message)
            seqs = [message.seq]
            self._post(
                {"type": "release", "stream": self.stream, "view": message.view, "seqs": seqs}
            )

    def _note_hold(self, message: Message) -> None:
        came_s = self._came_s.pop(message.seq, None)
        if came_s is not None and message.part == message.num_parts - 1:
            held_s = time.monotonic() - came_s
            self._holds.append(Hold(message.kind, message.step, message.microbatch, held_s))

    def take_holds(self) -> list[Hold]:
        """The messages released since this was last asked, in that order."""
        with self._lock:
            holds = list(self._holds)
            self._holds.clear()
            return holds
