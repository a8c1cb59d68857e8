"""Coding and decoding of chunks off the loop, in the loop's own worker pool."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Protocol

from geotrain.transport.bulk import Chunk
from geotrain.transport.events import CodedChunk
from geotrain.transport.frame import FrameHeader, chunk_header

STOP_TIMEOUT_S = 5.0
"""A running job codes at most 1 MiB, a few milliseconds; this is only the deadline of that wait."""


class Coder(Protocol):
    """The lossless coding, given by the link's owner; called on several worker threads at once."""

    def encode(self, raw: memoryview) -> bytes | None:
        """Coded bytes, or None where coding does not pay."""

    def decode_into(self, coded: memoryview, out: memoryview) -> None:
        """Fill `out` exactly, using all of `coded`; ValueError otherwise."""


class _Job:
    """One call on a worker that can be kept from beginning, or waited for once it has."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._lock = threading.Lock()

    def run(self) -> Any:
        with self._lock:
            call, self._call = self._call, None
            return None if call is None else call()

    def stop(self) -> None:
        """Afterwards the call is over or never begins, and holds no memory of the slot."""
        if not self._lock.acquire(timeout=STOP_TIMEOUT_S):
            raise TimeoutError(f"a coder did not finish one chunk within {STOP_TIMEOUT_S:g} s")
        self._call = None
        self._lock.release()


class ChunkWorkers:
    """The chunks of one link that are at the coder."""

    def __init__(self, coder: Coder) -> None:
        self._coder = coder
        self._jobs: set[_Job] = set()
        self.encoding_bytes = 0
        self.decoding_bytes = 0

    def encode(self, chunk: Chunk, done: Callable[[Chunk, bytes, bytes | None], None]) -> None:
        """Code a chunk; `done(chunk, header, coded or None)` on the loop unless stopped."""
        size = chunk.raw.nbytes
        self.encoding_bytes += size

        def finished(result: tuple[bytes, bytes | None] | None) -> None:
            self.encoding_bytes -= size
            if result is not None:
                done(chunk, *result)

        self._submit(_Job(lambda: _encode(self._coder, chunk)), finished)

    def decode(self, event: CodedChunk, done: Callable[[FrameHeader, bool], None]) -> None:
        """Decode into the chunk's place; `done(header, checksum is right)` unless stopped."""
        size, header = event.coded.nbytes, event.header
        self.decoding_bytes += size

        def finished(ok: bool | None) -> None:
            self.decoding_bytes -= size
            if ok is not None:
                done(header, ok)

        self._submit(_Job(lambda: _decode(self._coder, event)), finished)

    def stop(self) -> None:
        """Afterwards no job touches a slot any more (P-14); waits for what is running."""
        for job in self._jobs:
            job.stop()

    def _submit(self, job: _Job, finished: Callable[[Any], None]) -> None:
        self._jobs.add(job)
        future = asyncio.get_running_loop().run_in_executor(None, job.run)

        def collect(done: asyncio.Future[Any]) -> None:
            self._jobs.discard(job)
            finished(None if done.cancelled() else done.result())

        future.add_done_callback(collect)


def _encode(coder: Coder, chunk: Chunk) -> tuple[bytes, bytes | None]:
    coded = coder.encode(chunk.raw)
    if coded is not None and not 0 < len(coded) < chunk.raw.nbytes:
        coded = None
    header = chunk_header(
        stream=chunk.stream,
        view=chunk.view,
        seq=chunk.seq,
        raw_offset=chunk.offset,
        raw=chunk.raw,
        coded_length=None if coded is None else len(coded),
    )
    return header, coded


def _decode(coder: Coder, event: CodedChunk) -> bool:
    try:
        coder.decode_into(event.coded, event.target)
    except ValueError:
        return False
    return event.header.checksum_of(event.target) == event.header.checksum
