"""Where the next bytes of a lane go: headers, small payloads, slots. Sans-I/O.

Frames may be split anywhere (P-2). The caller owns no bytes: it asks `get_buffer`, fills some of it
and says how many with `buffer_updated`, so a raw chunk is received where it belongs, uncopied.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import xxhash

from geotrain.transport.frame import HEADER_BYTES, RAW, FrameHeader, FrameType, parse_header

SCRATCH_BYTES = 64 * 1024


class Held(Enum):
    """The lane must wait: what its chunk belongs to comes on another lane (P-19)."""

    HOLD = "hold"


HOLD = Held.HOLD
Place = memoryview | None | Held
"""Memory for a payload, or None: drain it."""


class Frame(NamedTuple):
    header: FrameHeader
    payload: memoryview | None
    """As on the wire; None where it was drained."""
    intact: bool
    """Whether a raw payload has the header's checksum (P-4); of a coded one nothing is said."""


class FrameReader:
    """One lane's bytes, as frames."""

    def __init__(self, place: Callable[[FrameHeader], Place]) -> None:
        """
        Args:
            place: Given a header whose sizes were checked, memory for exactly its payload on the
                wire, None to drain it, or HOLD to read nothing until `retry`. May raise
                ProtocolError.
        """
        self._place = place
        self._header_bytes = memoryview(bytearray(HEADER_BYTES))
        self._header: FrameHeader | None = None
        self._target: memoryview | None = self._header_bytes
        self._filled = 0
        self._scratch = memoryview(b"")
        self._hasher: xxhash.xxh3_64 | None = None
        self._discarding = False
        self.held = False
        """Whether nothing may be read now."""

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty. Not to be asked for while `held`."""
        if self._discarding:
            return self._scratch
        assert not self.held
        if self._target is not None:
            return self._target[self._filled :] if self._filled else self._target
        assert self._header is not None
        if not self._scratch:
            self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        return self._scratch[: self._header.payload_length - self._filled]

    def buffer_updated(self, nbytes: int) -> Frame | None:
        """The first `nbytes` of the buffer are filled.

        Returns:
            A frame when this was its last byte.

        Raises:
            ProtocolError: The header is not one, or `place` refused it.
        """
        self._filled += nbytes
        if self._header is None:
            if self._filled < HEADER_BYTES:
                return None
            self._begin_payload(parse_header(self._header_bytes))
            if self.held:
                return None
        elif self._hasher is not None and self._target is not None:
            # Piece by piece, while the bytes are still in the processor's cache.
            self._hasher.update(self._target[self._filled - nbytes : self._filled])
        header = self._header
        assert header is not None
        if self._filled < header.payload_length:
            return None
        intact = self._hasher is None or self._hasher.intdigest() == header.checksum
        frame = Frame(header, self._target, intact)
        self._header, self._target, self._filled = None, self._header_bytes, 0
        self._hasher = None
        return frame

    def retry(self) -> bool:
        """Ask `place` again for the chunk that is held.

        Returns:
            Whether reading goes on.

        Raises:
            ProtocolError: `place` refused it.
        """
        assert self._header is not None
        if self.held:
            self._begin_payload(self._header)
        return not self.held

    def drain(self) -> None:
        """Send the rest of a chunk in progress to scratch: its memory is no longer ours (P-14)."""
        if self._header is not None and self._header.type is FrameType.CHUNK:
            self._target = self._hasher = None

    def discard(self) -> FrameHeader | None:
        """Whatever else arrives means nothing, and goes nowhere (P-14).

        Returns:
            The chunk that was being received into its place, if there was one.
        """
        header, target = self._header, self._target
        self._discarding, self.held = True, False
        self._target = self._hasher = self._header = None
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        placed = header is not None and header.type is FrameType.CHUNK and target is not None
        return header if placed else None

    def _begin_payload(self, header: FrameHeader) -> None:
        self._header, self._filled, self._target = header, 0, None
        place = self._place(header)
        self.held = place is HOLD
        if isinstance(place, memoryview):
            assert place.nbytes == header.payload_length
            self._target = place
            if header.coding == RAW:
                self._hasher = header.hasher()
