"""Tensors unpacked ahead of their turn, while the stage still computes.

To copy a tensor out of the arena and decode it costs the training thread time in which nothing is
computed, and more than the bytes say: after a forward its caches are cold. Where the next message
of an edge is there already, another thread has unpacked it by the time it is asked for.
"""

import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from geotrain.pipeline.parcel import as_bytes, unpack_tree
from geotrain.pipeline.worker import Worker
from geotrain.transport.attachment_incoming import InStream
from geotrain.transport.messages import Message

Unpacked = tuple[Any, Any, str]
"""What `unpack_tree` returns."""


class Ahead:
    """The next tensors of one edge: expected, being unpacked, or unpacked.

    One message at most, so that what is in memory beyond the arena is one message more. Its slot
    goes back to the sender as soon as it is unpacked: to say so takes as long as waking the daemon.
    """

    def __init__(self, stream: InStream, unpacker: Worker) -> None:
        self._stream = stream
        self._unpacker = unpacker
        self._begun: tuple[Message, Future[Unpacked]] | None = None

    def expect(self, kind: str, step: int, microbatch: int, *, device: torch.device) -> None:
        """Unpack this message as soon as it is there, on the CPU alone.

        On a GPU the copy belongs into the order of the training thread's own stream.
        """
        # What is unpacked is nowhere else any more, so it is kept until somebody takes it.
        if device.type == "cpu" and self._begun is None:
            self._stream.expect(kind, step, microbatch, self._begin)

    def take(self, message: Message) -> Unpacked | None:
        """What has become of a message, whose slot is given back; None where nobody has begun.

        Raises:
            ValueError: The message does not add up.
        """
        if self._begun is None or self._begun[0] is not message:
            return None
        (_, unpacked), self._begun = self._begun, None
        return None if unpacked.cancel() else unpacked.result()

    def _begin(self, message: Message, payload: memoryview) -> None:
        self._begun = (message, self._unpacker.submit(partial(self._unpack, message, payload)))

    def _unpack(self, message: Message, payload: memoryview) -> Unpacked:
        begun_s = time.monotonic()
        unpacked = unpack_tree(message.header, as_bytes(payload), device=torch.device("cpu"))
        self._stream.release_early(message, begun_s=begun_s)
        return unpacked
