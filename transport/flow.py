"""Credit: a byte ring handed out in order, and its mirror at the sender.

The receiver of a stream reserves a slot for each message in sequence order. Where a slot lies
depends on nothing but the sizes reserved so far, so the sender keeps a Ring of the same capacity,
makes the same reservations, and knows without asking whether the receiver has room (P-7).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

ALIGNMENT = 64
MAX_UNRELEASED = 1_024
"""Messages of one stream sent and not released, with or without a slot: the credit in records."""


def aligned(offset: int) -> int:
    """The next place at which a slot may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Ring:
    """Contiguous slots out of `capacity` bytes: reserved in order, freed in any order."""

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: Bytes; 0 makes a ring in which nothing fits.
        """
        if capacity < 0:
            raise ValueError(f"capacity must be >= 0, got {capacity}")
        self.capacity = capacity
        self.live_bytes = 0
        # Never set back when the ring runs empty: the two ends see it empty at different times.
        self._cursor = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    @classmethod
    def restored(cls, capacity: int, *, cursor: int, slots: Iterable[tuple[int, int]]) -> "Ring":
        """A ring as another process knew it.

        Args:
            cursor: `cursor` after the last reservation.
            slots: (start, bytes) of those that are live.

        Raises:
            ValueError: They contradict each other.
        """
        ring = cls(capacity)
        if not 0 <= cursor <= aligned(capacity) or cursor % ALIGNMENT:
            raise ValueError(f"cursor {cursor} in a ring of {capacity}")
        for start, nbytes in sorted(slots):
            ring._cursor = start
            if start % ALIGNMENT or ring._place(nbytes) != start or not ring.fits(nbytes):
                raise ValueError(f"no room for a slot of {nbytes} bytes at {start}")
            ring.allocate(nbytes)
        ring._cursor = cursor
        return ring

    @property
    def cursor(self) -> int:
        """Where the next slot begins, if it fits before the end."""
        return self._cursor

    def fits(self, nbytes: int) -> bool:
        """Whether `allocate(nbytes)` would succeed now; on an empty ring any 1..capacity does."""
        if not 0 < nbytes <= self.capacity:
            return False
        start = self._place(nbytes)
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] < start + nbytes:
            return False
        if index == 0:
            return True
        below = self._starts[index - 1]
        return below + self._sizes[below] <= start

    def allocate(self, nbytes: int) -> int:
        """Reserve a slot; returns its first byte, a multiple of 64.

        Raises:
            ValueError: It does not fit now; ask `fits` first.
        """
        if not self.fits(nbytes):
            raise ValueError(f"{nbytes} bytes do not fit the ring of {self.capacity} now")
        start = self._place(nbytes)
        self._cursor = aligned(start + nbytes)
        insort(self._starts, start)
        self._sizes[start] = nbytes
        self.live_bytes += nbytes
        return start

    def free(self, start: int) -> None:
        """Give back the slot that begins at `start`.

        Raises:
            ValueError: No live slot begins there.
        """
        size = self._sizes.pop(start, None)
        if size is None:
            raise ValueError(f"no slot begins at {start}")
        del self._starts[bisect_left(self._starts, start)]
        self.live_bytes -= size

    def _place(self, nbytes: int) -> int:
        """Where the next slot of this size lies, free or not: the tail is skipped if too short."""
        return self._cursor if self._cursor + nbytes <= self.capacity else 0
