"""The incoming streams of one attachment: messages in order, each in its slot until released.

As `attachment_streams`: called by two threads under the attachment's lock, and never waiting.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from geotrain.transport.attachment_streams import Post
from geotrain.transport.attachment_times import MAX_TIMES, Hold
from geotrain.transport.flow import aligned
from geotrain.transport.messages import Message
from geotrain.transport.restoring import RestoredIn

OnExpected = Callable[[Message, memoryview], None]
"""Is told of an expected message and its payload."""


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


@dataclass(frozen=True, slots=True)
class _Delivered:
    """A message that nobody has taken yet, and when it came."""

    message: Message
    came_s: float


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
        self._queue: deque[_Delivered] = deque()
        self._early: deque[_Delivered] = deque()
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
            self._queue = deque(one for one in came if one.message.view == view)
            self._early.clear()
            for one in came:
                if one.message.view != view:
                    self._release(one.message)

    def close(self) -> None:
        """Let go of the arena, so that it can be unmapped."""
        self._memory = memoryview(b"")

    def take(self) -> Received | None:
        """The next message, or None. Its owner must `release` it."""
        with self._lock:
            if not self._queue:
                return None
            one = self._queue.popleft()
        return Received(one.message, self._payload(one.message), self._release, one.came_s)

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
        delivered = _Delivered(message, time.monotonic())
        self._came_s[message.seq] = delivered.came_s
        if message.view == self._view:
            self._queue.append(delivered)
            self._compare(message)
        elif message.view == board_view:
            self._early.append(delivered)
        else:
            self._release(message)

    def release_early(self, message: Message, *, begun_s: float) -> None:
        """Give back the slot of an expected message, for who has copied its payload.

        It may be in the hands of who took it, or be taken later: with a payload that says nothing
        any more, and not to be released again.

        Args:
            begun_s: When the copying began (monotonic). It held up no stage, so it counts as a part
                of the message's way here, and not as a hold.
        """
        self._release(message, until_s=begun_s)

    def _release(self, message: Message, until_s: float | None = None) -> None:
        # One step under the lock: a daemon that comes now must learn of it one way or the other.
        with self._lock:
            if message.view == self._delivered_view:
                if self._held.pop(message.seq, None) is None:
                    return  # early
                self._note_hold(message, until_s if until_s is not None else time.monotonic())
            seqs = [message.seq]
            self._post(
                {"type": "release", "stream": self.stream, "view": message.view, "seqs": seqs}
            )

    def _note_hold(self, message: Message, until_s: float) -> None:
        came_s = self._came_s.pop(message.seq, None)
        if came_s is not None and message.part == message.num_parts - 1:
            held_s = until_s - came_s
            self._holds.append(Hold(message.kind, message.step, message.microbatch, held_s))

    def take_holds(self) -> list[Hold]:
        """The messages released since this was last asked, in that order."""
        with self._lock:
            holds = list(self._holds)
            self._holds.clear()
            return holds
