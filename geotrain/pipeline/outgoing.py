"""What one end of a boundary has to send: packed, put into slots, handed to the daemon, in order.

A message may be packed by another thread while the stage computes on: on the CPU the copy into the
arena costs the training thread time in which nothing is computed. Everything else about a message
stays with the training thread: it asks for room before it runs an action, and hears of errors.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from geotrain.pipeline.parcel import Parcel, pack_record
from geotrain.pipeline.worker import Worker
from geotrain.transport.attachment_streams import OutStream

INLINE_BYTES = 4096

Key = tuple[str, int, int]
"""(kind, step, microbatch); microbatch is -1 for records."""


@dataclass(slots=True)
class _Outgoing:
    """A message that is not wholly handed over yet."""

    key: Key
    parcel: Parcel | None = None
    """None while it is being packed."""
    watched: Sequence[tuple[torch.Tensor, int]] = ()
    """Tensors that nobody may change until they are packed, and their versions."""
    packed_s: float = 0.0
    """How long that took, from when it was put out; 0 where the stage itself packed."""
    next_byte: int = 0
    next_part: int = 0


class ChangedError(Exception):
    """A tensor of this message was changed in place between being put out and being sent."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


class Outbox:
    """The messages of one outgoing stream that the daemon does not have yet.

    Args:
        worker: Packs what `send_later` is given.
        nudge: Wakes the training thread where it waits; called by the worker's thread.
    """

    def __init__(self, stream: OutStream, *, worker: Worker, nudge: Callable[[], None]) -> None:
        self._stream = stream
        self._worker = worker
        self._nudge = nudge
        self._lock = threading.Lock()
        """Held while messages go into slots; the deque itself only ever grows at its end and
        shrinks at its head."""
        self._messages: deque[_Outgoing] = deque()
        self._packed: deque[_Outgoing] = deque()
        """By the worker, and not looked at by the training thread since."""
        self._error: Exception | None = None
        self._largest_bytes = 0

    @property
    def largest_bytes(self) -> int:
        """Of the messages so far, those that travel inline left out."""
        return self._largest_bytes

    # ---- room

    def can_send(self) -> bool:
        """Whether a message as large as the largest so far can be handed over at once.

        Beside one that is still being packed, there must be room for both.
        """
        waiting = list(self._messages)
        part_bytes = min(self._largest_bytes, self._stream.max_part_bytes)
        if not waiting:
            return self._stream.fits(part_bytes)
        is_known = 0 < self._largest_bytes <= self._stream.max_part_bytes
        if len(waiting) > 1 or waiting[0].parcel is not None or not is_known:
            return False
        return self._stream.fits(part_bytes, count=2)

    @property
    def is_flushed(self) -> bool:
        """Whether everything sent has been handed to the daemon."""
        return not self._messages

    def unreleased(self, kind: str) -> int:
        """Messages of a kind that the neighbour has not taken yet."""
        # In this order: what the worker hands over meanwhile is counted twice rather than never.
        waiting = sum(message.key[0] == kind for message in list(self._messages))
        return waiting + self._stream.unacknowledged_of(kind)

    # ---- sending

    def send_record(self, key: Key, record: Mapping[str, Any]) -> None:
        """Send a small map, in order with the tensors."""
        self._enqueue(key, pack_record(record))

    def send(self, key: Key, pack: Callable[[], Parcel]) -> None:
        """Send what `pack` makes, now; what does not fit yet is kept and goes out with `pump`."""
        self._enqueue(key, self._measured(pack()))

    def send_later(
        self, key: Key, pack: Callable[[], Parcel], *, unchanged: Sequence[torch.Tensor]
    ) -> None:
        """Send what `pack` makes, on the worker's thread; its errors are raised by `pump`.

        Args:
            unchanged: Tensors that are read meanwhile. One that an operation of torch changes in
                place before the training thread has seen it packed is an error, for it may have
                been read half changed. (Writes past torch, by numpy or `.data`, nobody sees.)
        """
        watched = [(tensor, tensor._version) for tensor in unchanged]
        message = _Outgoing(key, watched=watched)
        self._messages.append(message)
        self._worker.submit(partial(self._pack, message, pack, time.monotonic()))

    def _pack(self, message: _Outgoing, pack: Callable[[], Parcel], since_s: float) -> None:
        try:
            parcel = self._measured(pack())
            # The planner has to know of it: it delays the neighbour as the link does.
            message.packed_s = time.monotonic() - since_s
            message.parcel = parcel
            self._packed.append(message)
            with self._lock:
                self._put_out()
        except Exception as exc:  # raised by the training thread's next `pump`
            self._error = exc
        self._nudge()

    def _measured(self, parcel: Parcel) -> Parcel:
        if parcel.payload_bytes > INLINE_BYTES:
            self._largest_bytes = max(self._largest_bytes, parcel.payload_bytes)
        return parcel

    def _enqueue(self, key: Key, parcel: Parcel) -> None:
        self._messages.append(_Outgoing(key, parcel))
        with self._lock:
            self._put_out()

    def has_news(self) -> bool:
        """Whether something was packed, or failed to be, since the last `pump`."""
        return bool(self._packed) or self._error is not None

    def pump(self) -> None:
        """Put out what waited for room, and look at what the worker has packed.

        Raises:
            ChangedError: A tensor that was being packed has been changed in place.
            Exception: Whatever `pack` raised on the worker's thread.
        """
        if self._error is not None:
            raise self._error
        # Only the training thread changes tensors, and it has come back from whatever it ran.
        while self._packed:
            message = self._packed.popleft()
            if any(tensor._version != version for tensor, version in message.watched):
                raise ChangedError(message.key)
            message.watched = ()
        # The worker is at it where the lock is taken, and nudges when it is done.
        if self._messages and self._lock.acquire(blocking=False):
            try:
                self._put_out()
            finally:
                self._lock.release()

    def _put_out(self) -> None:
        while self._messages:
            message = self._messages[0]
            if message.parcel is None or not self._put(message, message.parcel):
                return
            self._messages.popleft()

    def _put(self, message: _Outgoing, parcel: Parcel) -> bool:
        if parcel.payload_bytes <= INLINE_BYTES:
            return self._put_inline(message, parcel)
        return self._put_parts(message, parcel)

    def _put_inline(self, message: _Outgoing, parcel: Parcel) -> bool:
        if not self._stream.fits(0):
            return False
        kind, step, microbatch = message.key
        payload = torch.zeros(parcel.payload_bytes, dtype=torch.uint8)
        parcel.copy_range(0, payload)
        self._stream.send(
            kind=kind,
            step=step,
            microbatch=microbatch,
            header=parcel.header,
            inline=payload.numpy().tobytes(),
            packed_s=message.packed_s,
        )
        return True

    def _put_parts(self, message: _Outgoing, parcel: Parcel) -> bool:
        kind, step, microbatch = message.key
        part_bytes = self._stream.max_part_bytes
        while message.next_byte < parcel.payload_bytes:
            first = message.next_byte
            size = min(part_bytes, parcel.payload_bytes - first)
            if not self._stream.fits(size):
                return False
            start, slot = self._stream.reserve(size)
            parcel.copy_range(first, torch.frombuffer(slot, dtype=torch.uint8))
            self._stream.send(
                kind=kind,
                step=step,
                microbatch=microbatch,
                part=message.next_part,
                num_parts=-(-parcel.payload_bytes // part_bytes),
                header=parcel.header if message.next_part == 0 else b"",
                start=start,
                payload_bytes=size,
                hints=parcel.hints_within(first, size),
                packed_s=message.packed_s,
            )
            message.next_byte += size
            message.next_part += 1
        return True
