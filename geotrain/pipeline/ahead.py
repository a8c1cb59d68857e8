"""Tensors unpacked ahead of their turn, while the stage still computes.

To copy a tensor out of the arena and decode it costs the training thread time in which nothing is
computed, and more than the bytes say: after a forward its caches are cold. Where the next message
of an edge is there already, another thread has unpacked it by the time it is asked for.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from geotrain.pipeline.parcel import as_bytes, unpack_tree
from geotrain.transport.attachment_incoming import InStream
from geotrain.transport.messages import Message

Unpacked = tuple[Any, Any, str]
"""What `unpack_tree` returns."""
_Task = tuple[Callable[[], Unpacked], "Future[Unpacked]"]

_CLOSE_LIMIT_S = 5.0


class Unpacker:
    """One thread that unpacks for all edges of a region; it starts with the first task."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Unpacked]) -> "Future[Unpacked]":
        """Have `call` done; what it raises comes out of the future."""
        if self._thread is None:
            # Not an executor's thread: those refuse work as soon as the process begins to end, and
            # a message may come later than that.
            self._thread = threading.Thread(target=self._run, name="geotrain-unpacker", daemon=True)
            self._thread.start()
        future: Future[Unpacked] = Future()
        self._tasks.put((call, future))
        return future

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            _do(*task)
            del task  # or these tensors would live until the next ones come


def _do(call: Callable[[], Unpacked], future: "Future[Unpacked]") -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as exc:  # raised where the result is asked for
            future.set_exception(exc)


class Ahead:
    """The next tensors of one edge: expected, being unpacked, or unpacked.

    One message at most, so that what is in memory beyond the arena is one message more. Its slot
    stays taken, and its credit with the sender too, until the stage takes it.
    """

    def __init__(self, stream: InStream, unpacker: Unpacker) -> None:
        self._stream = stream
        self._unpacker = unpacker
        self._begun: tuple[Message, Future[Unpacked]] | None = None

    def expect(self, kind: str, step: int, microbatch: int, *, device: torch.device) -> None:
        """Unpack this message as soon as it is there, on the CPU alone.

        On a GPU the copy belongs into the order of the training thread's own stream.
        """
        self._begun = None
        if device.type == "cpu":
            self._stream.expect(kind, step, microbatch, self._begin)

    def take(self, message: Message) -> Unpacked | None:
        """What has become of a message; None where nobody has begun with it.

        Raises:
            ValueError: The message does not add up.
        """
        begun, self._begun = self._begun, None
        if begun is None or begun[0] is not message or begun[1].cancel():
            return None
        return begun[1].result()

    def _begin(self, message: Message, payload: memoryview) -> None:
        call = partial(_unpack, message.header, payload)
        self._begun = (message, self._unpacker.submit(call))


def _unpack(header: bytes, payload: memoryview) -> Unpacked:
    return unpack_tree(header, as_bytes(payload), device=torch.device("cpu"))
