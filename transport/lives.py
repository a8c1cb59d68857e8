"""The bulk lanes of one control lane: which are open, and of which only one end is gone. Pure.

Each end says GONE once its end is closed, whoever noticed first. After both have said it, nothing
of the lane is under way any more in either direction, and its number is never used again (P-18).
"""

from collections import deque

from geotrain.transport.frame import ProtocolError

MAX_BULK_LANES = 64
"""More never gained anything, and each costs memory at both ends."""


class BulkLives:
    """See the module. Lanes are told by their numbers."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._gone_here: set[int] = set()
        self._gone_there: set[int] = set()
        self._to_tell: deque[int] = deque()

    def why_not(self, lane: int) -> str | None:
        """Why this lane must not open now; None where it may."""
        if lane in self._open or lane in self._gone_here:
            return f"lane {lane} was there already"
        # Those that the peer never buries count too, so their number is bounded (P-1).
        if len(self._open) + len(self._gone_here) >= MAX_BULK_LANES:
            return f"a link has at most {MAX_BULK_LANES} bulk lanes"
        return None

    def up(self, lane: int) -> None:
        """Chunks may arrive on this lane from now on, and be written to it."""
        assert self.why_not(lane) is None
        self._open.add(lane)

    def down(self, lane: int) -> None:
        """Our end is closed: nothing from this lane is written any more, and the peer is told."""
        if lane not in self._open:
            return  # Of an earlier control lane.
        self._open.discard(lane)
        self._to_tell.append(lane)
        if lane in self._gone_there:
            self._gone_there.discard(lane)
        else:
            self._gone_here.add(lane)

    def peer_gone(self, lane: int) -> bool:
        """The peer has told; returns whether our end, if there is one, must be closed now.

        Raises:
            ProtocolError: It tells of ever more lanes that never were.
        """
        if lane in self._open:
            self._gone_there.add(lane)
            return True
        if lane in self._gone_here:
            self._gone_here.discard(lane)
            return False
        if lane not in self._to_tell:
            # Here it is not open yet, and never will be; the peer waits for an answer all the same.
            if len(self._to_tell) >= 2 * MAX_BULK_LANES:
                raise ProtocolError("GONE of lanes that never were")
            self._to_tell.append(lane)
        return True

    def next_to_tell(self) -> int | None:
        """A lane of which GONE is to be sent."""
        return self._to_tell.popleft() if self._to_tell else None

    @property
    def has_to_tell(self) -> bool:
        return bool(self._to_tell)

    def clear(self) -> None:
        """The control lane is gone, and all of them with it."""
        for numbers in (self._open, self._gone_here, self._gone_there):
            numbers.clear()
        self._to_tell.clear()
