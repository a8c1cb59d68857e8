"""One end of a boundary: trees of tensors and small records, to and from the neighbouring region.

Nothing here waits. A stage asks `can_send` before it runs an action, so `send` always finds room;
`pump` takes in what has come and puts out what is left of a message larger than the ring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from geotrain.compression.policy import Role
from geotrain.errors import RegionError
from geotrain.pipeline.ahead import Ahead
from geotrain.pipeline.outgoing import ChangedError, Key, Outbox
from geotrain.pipeline.parcel import (
    Codecs,
    Parcel,
    announced_bytes,
    as_bytes,
    pack_tree,
    unpack_record,
    unpack_tree,
)
from geotrain.pipeline.tree import TreeError, flatten
from geotrain.pipeline.worker import Worker
from geotrain.transport.attachment import Attachment
from geotrain.transport.attachment_incoming import Received
from geotrain.transport.attachment_times import Hold, Passage
from geotrain.transport.messages import BACKWARD, FORWARD, stream_id

MAX_MESSAGE_BYTES = 1 << 40
"""Above anything of today; a header that asks for more is a mistake or an attack."""


@dataclass(slots=True)
class _Incoming:
    """A message that has arrived, or is arriving in parts."""

    header: bytes
    payload: torch.Tensor
    slot: Received | None
    """What to release once the payload is used; None where parts were gathered."""
    came_s: float
    """When its last part came (monotonic)."""
    parts_left: int = 0
    next_byte: int = 0

    def release(self) -> None:
        if self.slot is not None:
            self.slot.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Who is on the other side, for error texts."""

    name: str
    own_name: str
    boundary: int


class Edge:
    """This region's end of one boundary.

    Args:
        direction: FORWARD where this region sends activations (its downstream edge), BACKWARD
            where it sends gradients (its upstream edge).
        packer: Packs what is sent, while the stage computes on.
        unpacker: Unpacks ahead of their turn what was received.
    """

    def __init__(
        self,
        attachment: Attachment,
        neighbour: Neighbour,
        *,
        direction: int,
        codecs: Codecs,
        packer: Worker,
        unpacker: Worker,
    ) -> None:
        self._neighbour = neighbour
        self._role: Role = "activation" if direction == FORWARD else "gradient"
        self._codecs = codecs
        self._out = attachment.out(stream_id(neighbour.boundary, direction))
        other = BACKWARD if direction == FORWARD else FORWARD
        self._in = attachment.incoming(stream_id(neighbour.boundary, other))
        self._outbox = Outbox(self._out, worker=packer, nudge=attachment.nudge)
        self._ahead = Ahead(self._in, unpacker)
        self._arrived: dict[Key, _Incoming] = {}
        self._gathering: _Incoming | None = None
        self._seen_unacknowledged = 0
        self._agreed: str | None = None

    @property
    def name(self) -> str:
        """The neighbouring region."""
        return self._neighbour.name

    def forget_agreement(self) -> None:
        """Another model begins: its first step agrees anew."""
        self._agreed = None

    # ---- sending

    def can_send(self) -> bool:
        """Whether a message as large as the largest so far can be handed over at once."""
        return self._outbox.can_send()

    @property
    def is_flushed(self) -> bool:
        """Whether everything sent has been handed to the daemon."""
        return self._outbox.is_flushed

    def unreleased(self, kind: str) -> int:
        """Messages of a kind that the neighbour has not taken yet."""
        return self._outbox.unreleased(kind)

    @property
    def wire_bytes(self) -> int:
        """Bytes the daemon put on the WAN for this edge, as acknowledged so far."""
        return self._out.wire_bytes

    @property
    def slots(self) -> int:
        """How many of the largest tensors so far may be on their way or untaken; 0: not known."""
        largest_bytes = self._outbox.largest_bytes
        return self._out.slots(largest_bytes) if largest_bytes else 0

    def take_times(self) -> tuple[list[Passage], list[Hold]]:
        """What was acknowledged by the neighbour, and taken here, since this was last asked."""
        return self._out.take_passages(), self._in.take_holds()

    def send_record(self, kind: str, *, step: int, record: Mapping[str, Any]) -> None:
        """Send a small map in band, in order with the tensors."""
        self._outbox.send_record((kind, step, -1), record)

    def send(self, kind: str, *, step: int, microbatch: int, tree: Any, side: Any = None) -> None:
        """Send a tree of tensors, and side inputs that ride along and are always lossless.

        What autograd made is packed by another thread while the stage computes on, and must not be
        changed in place from here on; `pump` notices where it is. Anything else may be a buffer
        of the user's, and is read before this returns, or kept until it is where the ring is full.

        Raises:
            RegionError: The tree cannot cross a boundary, or differs from the first step's. Of
                what is packed later, `pump` raises it.
        """
        key = (kind, step, microbatch)
        pack = partial(self._pack, key, tree, side)
        tensors = _made_by_autograd(kind, tree)
        if tensors is None:
            self._outbox.send(key, pack)
        else:
            self._outbox.send_later(key, pack, unchanged=tensors)

    def _pack(self, key: Key, tree: Any, side: Any) -> Parcel:
        try:
            parcel = pack_tree(tree, side, role=self._role, codecs=self._codecs)
        except TreeError as exc:
            raise self._error(key, str(exc)) from exc
        self._agree(key, parcel.signature)
        return parcel

    # ---- receiving

    def has_news(self) -> bool:
        """Whether something came, was packed or was acknowledged since the last `pump`."""
        return (
            self._in.pending() > 0
            or self._outbox.has_news()
            or self._out.unacknowledged < self._seen_unacknowledged
        )

    def pump(self) -> None:
        """Take in what has arrived, put out what waits for room.

        Raises:
            RegionError: What was sent cannot be.
        """
        # Counted first: an acknowledgement that comes while putting out is news again.
        self._seen_unacknowledged = self._out.unacknowledged
        try:
            self._outbox.pump()
        except ChangedError as exc:
            raise self._error(
                exc.key,
                "a tensor was changed in place after the segment had put it out and before it was "
                "sent; put out a clone of it",
            ) from exc
        self._seen_unacknowledged = max(self._seen_unacknowledged, self._out.unacknowledged)
        while (received := self._in.take()) is not None:
            message = received.message
            key = (message.kind, message.step, message.microbatch)
            if message.num_parts == 1:
                payload = as_bytes(received.payload)
                self._arrived[key] = _Incoming(message.header, payload, received, received.came_s)
            else:
                self._gather(key, received)

    def _gather(self, key: Key, received: Received) -> None:
        """Copy one part of a message larger than the ring, so that its slot is free again."""
        message = received.message
        if message.part == 0:
            self._gathering = self._start_gathering(key, received)
        gathering = self._gathering
        size = len(received.payload)
        if gathering is None or gathering.next_byte + size > gathering.payload.numel():
            raise self._error(key, f"part {message.part} from {self.name} does not fit the whole")
        first = gathering.next_byte
        gathering.payload[first : first + size].copy_(as_bytes(received.payload))
        received.release()
        gathering.next_byte += size
        gathering.came_s = received.came_s
        gathering.parts_left -= 1
        if gathering.parts_left == 0:
            missing = gathering.payload.numel() - gathering.next_byte
            if missing:
                raise self._error(key, f"{self.name} sent {missing} bytes too few")
            self._arrived[key] = gathering
            self._gathering = None

    def _start_gathering(self, key: Key, received: Received) -> _Incoming:
        message = received.message
        try:
            total = announced_bytes(message.header)
        except ValueError as exc:
            raise self._error(key, f"malformed header from {self.name}: {exc}") from exc
        if total > MAX_MESSAGE_BYTES:
            raise self._error(key, f"{self.name} announced a message of {total} bytes")
        payload = torch.empty(total, dtype=torch.uint8)
        return _Incoming(
            message.header, payload, None, received.came_s, parts_left=message.num_parts
        )

    def has(self, kind: str, step: int, microbatch: int = -1) -> bool:
        """Whether this message has arrived and can be taken."""
        return (kind, step, microbatch) in self._arrived

    def arrival(self, kind: str, step: int, microbatch: int = -1) -> tuple[float, int]:
        """When what `has` confirmed had come (monotonic seconds), and its payload's bytes."""
        incoming = self._arrived[kind, step, microbatch]
        return incoming.came_s, incoming.payload.numel()

    def take_record(self, kind: str, step: int) -> dict[str, Any]:
        """Take a map that `has` confirmed. Raises RegionError for a malformed one."""
        key = (kind, step, -1)
        incoming = self._arrived.pop(key)
        body = incoming.payload.numpy().tobytes()
        incoming.release()
        try:
            return unpack_record(body)
        except ValueError as exc:
            raise self._error(key, f"malformed record from {self.name}: {exc}") from exc

    def take(
        self, kind: str, step: int, microbatch: int, *, device: torch.device
    ) -> tuple[Any, Any]:
        """Take a tree and its side inputs that `has` confirmed.

        Returns:
            (tree, side) with fresh tensors on `device`: the values, shapes and strides that were
            sent, leaves of autograd that require a gradient where the sender's did.

        Raises:
            RegionError: The message does not add up, or differs from the first step's structure.
        """
        key = (kind, step, microbatch)
        incoming = self._arrived.pop(key)
        slot = incoming.slot
        try:
            unpacked = self._ahead.take(slot.message) if slot is not None else None
            if unpacked is None:
                unpacked = unpack_tree(incoming.header, incoming.payload, device=device)
                incoming.release()
        except ValueError as exc:
            raise self._error(key, f"malformed tensors from {self.name}: {exc}") from exc
        tree, side, found = unpacked
        self._ahead.expect(kind, step, microbatch + 1, device=device)
        self._agree(key, found)
        return tree, side

    # ---- agreement and errors

    def _agree(self, key: Key, found: str) -> None:
        if key[0] == "backward":
            return  # laid out like the forward it answers; None where nothing flowed
        if self._agreed is None:
            self._agreed = found
        if self._agreed != found:
            raise self._error(
                key,
                f"the boundary carries {found}, but the first step agreed on {self._agreed}; a "
                f"segment must put out the same structure and dtypes every time",
            )

    def _error(self, key: Key, detail: str) -> RegionError:
        kind, step, microbatch = key
        return RegionError(
            region=self._neighbour.own_name,
            kind="boundary",
            detail=detail,
            step=step,
            microbatch=microbatch if microbatch >= 0 else None,
            key=f"{kind} over boundary {self._neighbour.boundary}",
        )


def _made_by_autograd(kind: str, tree: Any) -> Sequence[torch.Tensor] | None:
    """The tensors of a tree where none but autograd refers to any of them, on the CPU; else None.

    On a GPU the copy belongs into the order of the training thread's own stream.
    """
    try:
        tensors = flatten(tree)[1]
    except TreeError:
        return None  # said where it is packed
    is_gradient = kind == "backward"
    for tensor in tensors:
        if tensor.device.type != "cpu" or not (is_gradient or tensor.grad_fn is not None):
            return None
    return tensors
