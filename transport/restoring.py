"""What a rank tells a daemon that took another's place: the truth of a session is in the ranks.

A daemon that is killed takes its view of every stream with it. The rank still has all that matters:
which messages the peer's rank has not released, with their slots, and which it was given itself.
After a second `attach` that names its incarnation it sends, in this order:

    resume     view, board, state, identity, error, note
    sent       once a stream that goes out: how far it had come
    held       a message that was sent and is not released, or was delivered and is not released
    received   once a stream that comes in: how far it had come
    resumed    the end; from here on records are as always

Pure. `Restoring` collects them and `finish` says what they amount to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geotrain.transport.flow import MAX_UNRELEASED
from geotrain.transport.maps import get_int, get_map
from geotrain.transport.messages import MAX_COUNT, Message, Presence

MAX_RESTORED_STREAMS = 64
MAX_RESTORED_REGIONS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredOut:
    """A stream that the rank sends on."""

    num_sent: int
    """The next message has this sequence number."""
    peer_capacity: int
    """Bytes of the in-ring at the peer."""
    peer_cursor: int
    """Of the mirror of that ring, after the last message sent."""
    unreleased: Sequence[tuple[Message, int]]
    """(message, where its slot lies in the peer's ring), in sequence order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredIn:
    """A stream that the rank receives."""

    num_delivered: int
    """The next message to deliver has this sequence number."""
    cursor: int
    """Of the rank's in-ring, after the last message delivered."""
    held: Sequence[Message]
    """Delivered and not released, in sequence order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Everything that a rank kept."""

    view: int
    """The view of its streams; 0 where it had none yet."""
    own: Presence
    board: Sequence[Presence]
    """The other regions' entries as it knew them."""
    sends: Mapping[int, RestoredOut] = field(default_factory=dict)
    receives: Mapping[int, RestoredIn] = field(default_factory=dict)


def to_records(restored: Restored) -> Iterator[dict[str, Any]]:
    """As the rank says it."""
    yield {"type": "resume", "view": restored.view}
    for entry in (restored.own, *restored.board):
        # One a record: each may carry 32 KiB of identity and error.
        yield {"type": "board", "entry": entry.to_map()}
    for stream, out in restored.sends.items():
        yield {
            "type": "sent",
            "stream": stream,
            "num_sent": out.num_sent,
            "peer_capacity": out.peer_capacity,
            "peer_cursor": out.peer_cursor,
        }
        for message, slot in out.unreleased:
            yield {"type": "held", "message": message.to_map(with_start=True), "slot": slot}
    for stream, incoming in restored.receives.items():
        yield {
            "type": "received",
            "stream": stream,
            "num_delivered": incoming.num_delivered,
            "cursor": incoming.cursor,
        }
        for message in incoming.held:
            yield {"type": "held", "message": message.to_map(with_start=True)}
    yield {"type": "resumed"}


class Restoring:
    """Takes the records of one rank until `resumed`."""

    def __init__(self, region: str, incarnation: int) -> None:
        self._region = region
        self._incarnation = incarnation
        self._view: int | None = None
        self._board: list[Presence] = []
        self._sent: dict[int, Mapping[Any, Any]] = {}
        self._received: dict[int, Mapping[Any, Any]] = {}
        self._held: dict[int, list[tuple[Message, int]]] = {}

    def take(self, record: Mapping[str, Any]) -> Restored | None:
        """The next record; what they amount to at the last one.

        Raises:
            ValueError: Not such a record, out of turn, or they contradict each other.
        """
        kind = record["type"]
        if (self._view is None) != (kind == "resume"):
            raise ValueError(f"a record {kind!r} out of turn while resuming")
        match kind:
            case "resume":
                self._view = _count(record, "view", 2**64 - 1)
            case "board":
                if len(self._board) >= MAX_RESTORED_REGIONS:
                    raise ValueError(f"more than {MAX_RESTORED_REGIONS} board entries")
                self._board.append(Presence.from_map(get_map(record, "entry") or {}))
            case "sent":
                self._begin(self._sent, record)
            case "received":
                self._begin(self._received, record)
            case "held":
                self._hold(record)
            case "resumed":
                return self._finish()
            case _:
                raise ValueError(f"a record {kind!r} while resuming")
        return None

    def _begin(self, streams: dict[int, Mapping[Any, Any]], record: Mapping[str, Any]) -> None:
        stream = _count(record, "stream")
        if stream in self._sent or stream in self._received:
            raise ValueError(f"stream {stream} is restored twice")
        if len(self._held) >= MAX_RESTORED_STREAMS:
            raise ValueError(f"more than {MAX_RESTORED_STREAMS} streams")
        streams[stream] = record
        self._held[stream] = []

    def _hold(self, record: Mapping[str, Any]) -> None:
        message = Message.from_map(get_map(record, "message") or {}, with_start=True)
        held = self._held.get(message.stream)
        if held is None:
            raise ValueError(f"a message of stream {message.stream}, which was not begun")
        if len(held) >= MAX_UNRELEASED:
            raise ValueError(f"stream {message.stream}: more than {MAX_UNRELEASED} messages")
        if message.view != self._view:
            raise ValueError(f"stream {message.stream}: message {message.seq} of another view")
        if held and held[-1][0].seq >= message.seq:
            raise ValueError(f"stream {message.stream}: messages out of sequence")
        held.append((message, _count(record, "slot", default=0)))

    def _finish(self) -> Restored:
        own = [entry for entry in self._board if entry.region == self._region]
        if len(own) != 1 or own[0].incarnation != self._incarnation:
            raise ValueError("the rank's own entry is missing, twice there, or of another life")
        assert self._view is not None
        return Restored(
            view=self._view,
            own=own[0],
            board=[entry for entry in self._board if entry.region != self._region],
            sends={stream: self._out(stream) for stream in self._sent},
            receives={stream: self._in(stream) for stream in self._received},
        )

    def _out(self, stream: int) -> RestoredOut:
        record, held = self._sent[stream], self._held[stream]
        num_sent = _count(record, "num_sent")
        _check_below(held, num_sent)
        return RestoredOut(
            num_sent=num_sent,
            peer_capacity=_count(record, "peer_capacity"),
            peer_cursor=_count(record, "peer_cursor"),
            unreleased=held,
        )

    def _in(self, stream: int) -> RestoredIn:
        record, held = self._received[stream], self._held[stream]
        num_delivered = _count(record, "num_delivered")
        _check_below(held, num_delivered)
        return RestoredIn(
            num_delivered=num_delivered,
            cursor=_count(record, "cursor"),
            held=[message for message, _ in held],
        )


def _check_below(held: Sequence[tuple[Message, int]], limit: int) -> None:
    if held and held[-1][0].seq >= limit:
        raise ValueError(f"message {held[-1][0].seq} of a stream that has come to {limit}")


def _count(
    record: Mapping[Any, Any], key: str, limit: int = MAX_COUNT, default: int | None = None
) -> int:
    value = get_int(record, key) if default is None else get_int(record, key, default)
    if not 0 <= value <= limit:
        raise ValueError(f"{key}: must be 0 to {limit}, got {value}")
    return value
