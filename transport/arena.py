"""The arena: memory that one rank and its daemon share, cut into one byte ring per stream.

The rank makes it (a memfd, really allocated, sealed against resizing), the daemon receives the file
descriptor over the attachment's socket. It has no name, so nothing is left when both have gone.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence

from geotrain.errors import AttachError

IN, OUT = "in", "out"
PAGE_BYTES = mmap.PAGESIZE
MIB = 1 << 20

Rings = Mapping[tuple[int, str], tuple[int, int]]
"""(stream, "in" | "out") -> (offset, capacity), both in bytes and multiples of the page size."""

_MADV_POPULATE_WRITE = 23
_STEP_BYTES = 4 * MIB
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def plan_rings(
    total_bytes: int, streams_in: Sequence[int], streams_out: Sequence[int]
) -> dict[tuple[int, str], tuple[int, int]]:
    """Share `total_bytes` equally among the streams, in whole pages.

    Raises:
        AttachError: The arena is too small to give every stream a page.
    """
    keys = [(stream, IN) for stream in streams_in] + [(stream, OUT) for stream in streams_out]
    if not keys:
        return {}
    capacity = total_bytes // len(keys) // PAGE_BYTES * PAGE_BYTES
    if capacity < PAGE_BYTES:
        raise AttachError(
            f"an arena of {total_bytes} bytes is too small for {len(keys)} streams; "
            "raise site.arena_mib"
        )
    return {key: (index * capacity, capacity) for index, key in enumerate(keys)}


def check_rings(rings: Rings, size: int) -> None:
    """Refuse rings that are not page aligned, leave the arena or share a byte.

    Raises:
        ValueError: Naming the ring.
    """
    end_of_previous = 0
    for (stream, direction), (offset, capacity) in sorted(rings.items(), key=lambda item: item[1]):
        name = f"ring {direction} of stream {stream}"
        if offset % PAGE_BYTES or capacity % PAGE_BYTES or capacity <= 0 or offset < 0:
            raise ValueError(f"{name} is not made of whole pages")
        if offset < end_of_previous:
            raise ValueError(f"{name} overlaps the one before it")
        if offset + capacity > size:
            raise ValueError(f"{name} ends at {offset + capacity}, outside the {size} bytes")
        end_of_previous = offset + capacity


def available_bytes() -> int:
    """What the kernel thinks can be allocated without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    raise AssertionError("/proc/meminfo without MemAvailable")


class Arena:
    """One mapping of the shared memory; both ends hold one.

    `close` waits for nobody: where a view is still held elsewhere, the pages are unmapped when the
    last such view goes.
    """

    def __init__(self, fd: int, size: int, *, populate: bool) -> None:
        self.size = size
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        mapping = mmap.mmap(fd, size, flags=flags)
        self._mapping: mmap.mmap | None = mapping
        self.memory = memoryview(mapping)

    @classmethod
    def create(cls, size: int) -> tuple["Arena", int]:
        """Allocate `size` bytes; returns the mapping and the descriptor to pass on and close.

        Raises:
            AttachError: The machine, or the memory limit of the container, has not that much left.
        """
        if size > available_bytes():
            # Asked for in earnest, it would have the kernel kill some process instead of refusing.
            raise AttachError(
                f"an arena of {size / MIB:.0f} MiB does not fit the {available_bytes() / MIB:.0f} "
                "MiB that this machine has available; lower site.arena_mib"
            )
        fd = os.memfd_create("geotrain-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Without this a page that cannot be had is a SIGBUS in the middle of a step.
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size, populate=True), fd
        except OSError as exc:
            os.close(fd)
            raise AttachError(
                f"cannot allocate an arena of {size / MIB:.0f} MiB ({exc.strerror}); "
                "lower site.arena_mib or raise the memory limit"
            ) from exc

    @classmethod
    def adopt(cls, fd: int, size: int) -> "Arena":
        """Map an arena made by another process, once it is known to be safe to touch.

        Takes `fd` over and closes it, in every case.

        Raises:
            ValueError: Not a memfd, not sealed, not of the size announced, or not really allocated.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS:
                raise ValueError("the arena is not sealed against resizing")
            status = os.fstat(fd)
            if status.st_size != size or size <= 0:
                raise ValueError(f"the arena has {status.st_size} bytes, not the {size} announced")
            if status.st_blocks * 512 < size:
                raise ValueError("the arena is not allocated in full")
            return cls(fd, size, populate=False)
        except OSError as exc:
            if exc.errno == errno.EINVAL:
                raise ValueError("the arena's descriptor is not a memfd") from exc
            raise ValueError(f"the arena cannot be mapped ({exc.strerror})") from exc
        finally:
            os.close(fd)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """A writable view of a part of the arena."""
        assert 0 <= offset <= offset + num_bytes <= self.size
        return self.memory[offset : offset + num_bytes]

    def populate(self, offset: int, num_bytes: int) -> None:
        """Map a part of the pages now, which otherwise happens one by one as they are touched."""
        if self._mapping is None:
            return
        end = min(offset + num_bytes, self.size)
        # An old kernel (below 5.14) does not know how; then it stays at one by one.
        with contextlib.suppress(OSError):
            self._mapping.madvise(_MADV_POPULATE_WRITE, offset, end - offset)

    def close(self) -> None:
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        # Bit by bit: the interpreter stands still while pages are unmapped.
        for offset in range(0, self.size, _STEP_BYTES):
            mapping.madvise(mmap.MADV_DONTNEED, offset, min(_STEP_BYTES, self.size - offset))
        try:
            self.memory.release()
            mapping.close()
        except BufferError:
            # Someone still holds a view (a lane's write queue, a tensor made from a slot): now that
            # our own reference is gone, the pages are unmapped together with the last of them.
            self.memory = memoryview(b"")
