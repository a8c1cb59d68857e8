"""What a lane and a session tell their driver."""

from dataclasses import dataclass
from typing import Any

from geotrain.transport.frame import FrameHeader
from geotrain.transport.hello import Join
from geotrain.transport.messages import Message, Presence


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerNamed:
    """The handshake agreed; the driver now answers with `admit` or `close` (two lanes may meet)."""

    boot: int
    index: int
    epoch: int
    """Of the peer, where it dialled: what its bulk lanes must name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused:
    """One side refused the other; the lane is closed and a retry makes sense only slowly."""

    reason: str
    differing: tuple[tuple[str, Any, Any], ...]
    """(key, this side's value, the peer's value)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneJoins:
    """A bulk lane has shaken hands; the driver now answers with `admit` or `close`."""

    join: Join | None
    """What the peer asks for; None where this side asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneGone:
    """The peer's end of this bulk lane is closed: close ours at once, before anything else."""

    lane: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesWished:
    """How many bulk lanes the peer would like to have."""

    num_lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneClosed:
    """The lane is finished; nothing more comes from it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardReceived:
    entries: tuple[Presence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedChunk:
    """A coded chunk arrived whole: decode it into `target` on a worker, then `chunk_decoded`."""

    header: FrameHeader
    coded: memoryview
    target: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The next message of its stream is complete; `message.start` is its slot in the in-ring."""

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Acked:
    """The peer's rank has released these; their payloads may be overwritten."""

    stream: int
    view: int
    seqs: list[int]
    wire_bytes: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewFailed:
    """This view cannot go on over this link; nothing more is sent or taken for it."""

    view: int
    reason: str


Event = (
    PeerNamed
    | PeerRefused
    | LaneJoins
    | LaneGone
    | LanesWished
    | LaneClosed
    | BoardReceived
    | CodedChunk
    | Delivered
    | Acked
    | ViewFailed
)
SessionEvent = Delivered | Acked | ViewFailed | LaneGone
