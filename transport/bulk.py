"""Which chunk of which message goes next: oldest microbatch first, then sequence order. Pure."""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from geotrain.transport.sending import Outgoing

_Queue = list[tuple[tuple[int, int, int], int, Outgoing]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A range of a payload that is to be written next, or to be coded first."""

    stream: int
    view: int
    seq: int
    offset: int
    raw: memoryview
    generation: int
    """Of the queue's contents it was cut from; after `clear` it may no longer be missing."""


class BulkQueue:
    """Messages with ranges to send raw and ranges to offer to the coder, by priority."""

    def __init__(self) -> None:
        self._raw: _Queue = []
        self._codable: _Queue = []
        self._arrivals = count()
        self._generation = 0

    def push(self, outgoing: Outgoing) -> None:
        """Queue what `outgoing.raw` and `outgoing.codable` hold; twice does no harm."""
        entry = (outgoing.message.priority, next(self._arrivals), outgoing)
        if len(outgoing.raw):
            heappush(self._raw, entry)
        if len(outgoing.codable):
            heappush(self._codable, entry)

    def clear(self) -> None:
        """Forget everything, and what was cut and not yet written."""
        self._raw, self._codable = [], []
        self._generation += 1

    def is_current(self, chunk: Chunk) -> bool:
        return chunk.generation == self._generation

    def next_raw(self, limit: int) -> Chunk | None:
        while self._raw:
            outgoing = self._raw[0][2]
            taken = outgoing.raw.pop_first(limit)
            if taken is not None:
                return self._cut(outgoing, taken)
            heappop(self._raw)
        return None

    @property
    def has_any(self) -> bool:
        """Whether there may be something to send."""
        return bool(self._raw or self._codable)

    @property
    def has_codable(self) -> bool:
        """Whether `next_codable` is worth asking."""
        return bool(self._codable)

    def next_codable(self, limit: int) -> Chunk | None:
        while self._codable:
            outgoing = self._codable[0][2]
            taken = outgoing.codable.pop_first(limit)
            if taken is not None:
                return self._cut(outgoing, taken)
            heappop(self._codable)
        return None

    def _cut(self, outgoing: Outgoing, taken: tuple[int, int]) -> Chunk:
        assert outgoing.payload is not None
        message = outgoing.message
        return Chunk(
            stream=message.stream,
            view=message.view,
            seq=message.seq,
            offset=taken[0],
            raw=outgoing.payload[taken[0] : taken[1]],
            generation=self._generation,
        )
