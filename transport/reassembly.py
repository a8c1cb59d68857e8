"""Pieces of messages: which byte ranges have arrived, and where the next one goes."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from geotrain.transport.messages import Message


class Ranges:
    """A set of integers as ascending, disjoint, non-adjacent half-open ranges."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __len__(self) -> int:
        """How many separate ranges there are."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"

    @property
    def total(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        if end <= start:
            return
        if self._ends and self._ends[-1] == start:
            # Nearly always: ranges come in order.
            self._ends[-1] = end
            return
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def remove(self, start: int, end: int) -> None:
        if end <= start:
            return
        low = bisect_right(self._ends, start)
        high = bisect_left(self._starts, end)
        if low >= high:
            return
        first, last = self._starts[low], self._ends[high - 1]
        kept = [(first, start)] * (first < start) + [(end, last)] * (end < last)
        self._starts[low:high] = [piece[0] for piece in kept]
        self._ends[low:high] = [piece[1] for piece in kept]

    def covers(self, start: int, end: int) -> bool:
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and end <= self._ends[index]

    def overlaps(self, start: int, end: int) -> bool:
        index = bisect_right(self._ends, start)
        return index < len(self._starts) and self._starts[index] < end

    def pop_first(self, limit: int) -> tuple[int, int] | None:
        """Take the lowest range, or its first `limit` integers; None when empty."""
        if not self._starts:
            return None
        start = self._starts[0]
        if self._ends[0] - start > limit:
            self._starts[0] = start + limit
            return start, start + limit
        return self._starts.pop(0), self._ends.pop(0)

    def missing(self, size: int) -> "Ranges":
        """The complement within 0..size."""
        rest = Ranges([(0, size)])
        for start, end in self:
            rest.remove(start, end)
        return rest


class Incoming:
    """One message whose header has arrived and which its rank has not released."""

    __slots__ = ("arriving", "failures", "message", "pending", "received")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.arriving = Ranges()
        """Some lane is in the middle of it, and has a view of the slot (P-17)."""
        self.received = Ranges()
        """Verified and in the slot."""
        self.pending = Ranges()
        """Arrived whole, still being decoded into the slot; the peer need not resend it (P-9)."""
        self.failures: dict[int, int] = {}
        """Offset -> how often the chunk there failed its checksum."""

    @property
    def complete(self) -> bool:
        size = self.message.payload_bytes
        return size == 0 or self.received.covers(0, size)

    def wants(self, start: int, end: int) -> bool:
        """Whether none of this range has arrived; False means all of it has.

        Raises:
            ValueError: Outside the payload, on another lane just now, or arrived only in part.
        """
        if end > self.message.payload_bytes:
            raise ValueError(f"{start}..{end} of {self.message.payload_bytes} bytes")
        if self.arriving.overlaps(start, end):
            raise ValueError(f"{start}..{end} is arriving already")
        if not (self.received.overlaps(start, end) or self.pending.overlaps(start, end)):
            return True
        if self.arrived().covers(start, end):
            return False
        raise ValueError(f"{start}..{end} has arrived in part")

    def arrived(self) -> Ranges:
        """What the sender need not send again."""
        both = Ranges(self.received)
        for start, end in self.pending:
            both.add(start, end)
        return both
