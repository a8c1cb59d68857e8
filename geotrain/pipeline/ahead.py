"""Tensors unpacked ahead of their turn, while the stage still computes.

To copy a tensor out of the arena and decode it costs the training thread time in which nothing is
computed, and more than the bytes say: after a forward its caches are cold. Where the next message
of an edge is there already, another thread has unpacked it by the time it is asked for.
"""

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
    stays taken, and its credit with the sender too, until the stage takes it.
    """

    def __init__(self, stream: InStream, unpacker: Worker) -> None:
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
