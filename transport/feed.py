"""The chunks of one link, for whichever lane is free, and how much all of them take in a turn."""

import asyncio
from collections import deque
from collections.abc import Callable

from geotrain.transport.bulk import Chunk
from geotrain.transport.estimator import RateEstimator
from geotrain.transport.frame import chunk_header
from geotrain.transport.session import Session
from geotrain.transport.workers import ChunkWorkers

TURN_BYTES = 1 << 20
MAX_CODING_BYTES = 32 << 20
"""At the coder, or coded and not yet written."""


class ChunkFeed:
    """One queue for all lanes: no chunk belongs to a lane before the lane can write it."""

    def __init__(
        self, session: Session, workers: ChunkWorkers, on_ready: Callable[[], None]
    ) -> None:
        """
        Args:
            on_ready: There may be chunks for a lane that had found none.
        """
        self.on_ready = on_ready
        self.sent = RateEstimator()
        """Of all lanes together."""
        self.ran_dry = True
        """Whether a lane could have written more than there was, since `take_ran_dry`."""
        self.room = TURN_BYTES
        """Bytes of chunks that may still be written in this turn of the loop, by all lanes."""
        self._session = session
        self._workers = workers
        self._coded: deque[tuple[Chunk, bytes, bytes | None]] = deque()
        self._coded_bytes = 0
        self._turn_ends = False

    @property
    def has_any(self) -> bool:
        return bool(self._coded) or self._session.has_bulk

    def take(self, limit: int) -> tuple[Chunk, bytes, memoryview] | None:
        """The next chunk with its header and its bytes on the wire; it must be written.

        Coded ones come first, they were cut first.
        """
        while self._coded:
            chunk, header, coded = self._coded.popleft()
            self._coded_bytes -= chunk.raw.nbytes
            if self._session.is_current(chunk):
                return chunk, header, chunk.raw if coded is None else memoryview(coded)
        raw = self._session.next_raw(limit)
        if raw is None:
            return None
        header = chunk_header(
            stream=raw.stream, view=raw.view, seq=raw.seq, raw_offset=raw.offset, raw=raw.raw
        )
        return raw, header, raw.raw

    def feed_coder(self, limit: int) -> None:
        """Give the workers what may be coded, in chunks of at most `limit` bytes."""
        while (
            self._session.has_codable
            and self._workers.encoding_bytes + self._coded_bytes < MAX_CODING_BYTES
        ):
            chunk = self._session.next_codable(limit)
            if chunk is None:
                return
            self._workers.encode(chunk, self._on_encoded)

    def wrote(self, nbytes: int) -> None:
        """So much of a chunk was handed to a carrier."""
        self.room -= nbytes
        if not self._turn_ends:
            self._turn_ends = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def nothing_left(self) -> None:
        """A lane could have written, and there was nothing."""
        self.ran_dry = True
        self.sent.end_burst()

    def take_ran_dry(self) -> bool:
        """`ran_dry`, which begins anew."""
        # Where there is nothing, lanes are not asked, and none would tell of it.
        ran_dry, self.ran_dry = self.ran_dry, not self.has_any
        return ran_dry

    def forget(self) -> None:
        """What was cut and not written belongs to a view or a control lane that is gone."""
        self._coded.clear()
        self._coded_bytes = 0

    def _end_turn(self) -> None:
        self._turn_ends = False
        self.room = TURN_BYTES

    def _on_encoded(self, chunk: Chunk, header: bytes, coded: bytes | None) -> None:
        if self._session.is_current(chunk):
            self._coded.append((chunk, header, coded))
            self._coded_bytes += chunk.raw.nbytes
            self.on_ready()
