"""The arena: really allocated, sealed, refused when it is not, unmapped when nobody looks at it."""

import fcntl
import mmap
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.errors import AttachError
from geotrain.transport.arena import IN, MIB, OUT, PAGE_BYTES, Arena, check_rings, plan_rings

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def make_memfd(size: int, *, seals: int = SEALS, allocate: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if allocate:
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:")


@given(
    total_bytes=st.integers(0, 1 << 30),
    streams_in=st.lists(st.integers(0, 10), unique=True, max_size=5),
    streams_out=st.lists(st.integers(0, 10), unique=True, max_size=5),
)
def test_planned_rings_are_equal_aligned_and_accepted_by_the_daemon(
    total_bytes: int, streams_in: list[int], streams_out: list[int]
) -> None:
    num_rings = len(streams_in) + len(streams_out)
    if num_rings and total_bytes // num_rings < PAGE_BYTES:
        with pytest.raises(AttachError, match=r"raise site\.arena_mib"):
            plan_rings(total_bytes, streams_in, streams_out)
        return
    rings = plan_rings(total_bytes, streams_in, streams_out)
    assert set(rings) == {(s, IN) for s in streams_in} | {(s, OUT) for s in streams_out}
    assert len({capacity for _, capacity in rings.values()}) <= 1
    check_rings(rings, total_bytes)


@pytest.mark.parametrize(
    ("rings", "complaint"),
    [
        ({(0, IN): (0, 2 * PAGE_BYTES), (0, OUT): (PAGE_BYTES, PAGE_BYTES)}, "overlaps"),
        ({(0, IN): (0, PAGE_BYTES), (1, IN): (0, PAGE_BYTES)}, "overlaps"),
        ({(0, IN): (0, 5 * PAGE_BYTES)}, "outside"),
        ({(0, IN): (64, PAGE_BYTES)}, "whole pages"),
        ({(0, IN): (0, PAGE_BYTES - 1)}, "whole pages"),
        ({(0, IN): (0, 0)}, "whole pages"),
    ],
)
def test_bad_rings_are_refused(
    rings: dict[tuple[int, str], tuple[int, int]], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_rings(rings, 4 * PAGE_BYTES)


def test_both_ends_see_the_same_bytes() -> None:
    size = 3 * PAGE_BYTES
    rank, fd = Arena.create(size)
    daemon = Arena.adopt(fd, size)
    rank.view(PAGE_BYTES, 5)[:] = b"hello"
    assert bytes(daemon.view(PAGE_BYTES, 5)) == b"hello"
    daemon.view(0, 3)[:] = b"bye"
    assert bytes(rank.view(0, 3)) == b"bye"
    rank.close()
    daemon.close()
    assert not is_open(fd)


def test_a_created_arena_is_allocated_and_cannot_be_resized() -> None:
    arena, fd = Arena.create(64 * PAGE_BYTES)
    assert os.fstat(fd).st_blocks * 512 >= 64 * PAGE_BYTES
    for size in (PAGE_BYTES, 65 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    arena.close()


def test_memory_that_cannot_be_had_is_named_with_its_remedy() -> None:
    with pytest.raises(AttachError, match=r"1073741824 MiB.*site\.arena_mib"):
        Arena.create(1 << 50)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, hard))
    try:
        with pytest.raises(AttachError, match=r"2 MiB \(File too large\).*site\.arena_mib"):
            Arena.create(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("seals", "allocate", "announced", "complaint"),
    [
        (0, True, 4 * PAGE_BYTES, "not sealed"),
        (fcntl.F_SEAL_SHRINK, True, 4 * PAGE_BYTES, "not sealed"),
        (fcntl.F_SEAL_GROW, True, 4 * PAGE_BYTES, "not sealed"),
        (SEALS, True, 5 * PAGE_BYTES, "not the 20480 announced"),
        (SEALS, True, 0, "not the 0 announced"),
        (SEALS, False, 4 * PAGE_BYTES, "not allocated"),
    ],
)
def test_an_unsafe_arena_is_refused_and_its_descriptor_closed(
    seals: int, allocate: bool, announced: int, complaint: str
) -> None:
    fd = make_memfd(4 * PAGE_BYTES, seals=seals, allocate=allocate)
    with pytest.raises(ValueError, match=complaint):
        Arena.adopt(fd, announced)
    assert not is_open(fd)


def test_something_that_is_no_memfd_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE_BYTES))
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(ValueError, match="not a memfd"):
        Arena.adopt(fd, PAGE_BYTES)
    assert not is_open(fd)


def test_close_unmaps_at_once_or_with_the_last_view() -> None:
    before = mapped_arenas()
    arena, fd = Arena.create(PAGE_BYTES)
    os.close(fd)
    arena.close()
    arena.close()
    assert mapped_arenas() == before

    arena, fd = Arena.create(PAGE_BYTES)
    os.close(fd)
    view = arena.view(0, 8)
    arena.close()
    view[:] = b"still ok"
    assert mapped_arenas() == before + 1
    del view
    assert mapped_arenas() == before


def test_page_size_is_the_machine_s() -> None:
    assert PAGE_BYTES == mmap.PAGESIZE
