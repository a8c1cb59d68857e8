import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.transport.flow import ALIGNMENT, Ring

CAPACITY = 1000


@given(
    st.lists(
        st.one_of(
            st.integers(1, CAPACITY).map(lambda n: ("send", n)),
            st.integers(0, 99).map(lambda n: ("release", n)),
            st.integers(0, 99).map(lambda n: ("ack", n)),
        )
    )
)
def test_mirror_gives_the_same_slots_and_no_two_live_ones_overlap(ops):
    """The receiver frees first and in any order, the mirror when told, in any order."""
    ring, mirror = Ring(CAPACITY), Ring(CAPACITY)
    held: list[tuple[int, int]] = []
    untold: list[tuple[int, int]] = []
    for op, number in ops:
        if op == "send" and mirror.fits(number):
            assert ring.fits(number), "what fits the mirror fits the ring"
            start = mirror.allocate(number)
            assert ring.allocate(number) == start
            assert start % ALIGNMENT == 0 and start + number <= CAPACITY
            for other, size in held:
                assert start + number <= other or other + size <= start
            held.append((start, number))
        elif op == "release" and held:
            slot = held.pop(number % len(held))
            ring.free(slot[0])
            untold.append(slot)
        elif op == "ack" and untold:
            mirror.free(untold.pop(number % len(untold))[0])
        assert ring.live_bytes == sum(size for _, size in held)


@given(st.lists(st.integers(1, CAPACITY)))
def test_any_slot_fits_an_empty_ring_wherever_its_cursor_stands(sizes):
    ring = Ring(CAPACITY)
    for size in sizes:
        assert ring.fits(size)
        ring.free(ring.allocate(size))


def test_tail_too_short_is_skipped_and_counts_again_once_freed():
    ring = Ring(256)
    assert [ring.allocate(64), ring.allocate(64)] == [0, 64]
    assert not ring.fits(192)
    ring.free(0)
    assert not ring.fits(129)  # 128 bytes at the tail, 64 at the head
    assert ring.fits(128)
    ring.free(64)
    assert ring.allocate(192) == 0


def test_cursor_is_not_set_back_when_the_ring_runs_empty():
    ring = Ring(256)
    ring.free(ring.allocate(64))
    assert ring.allocate(64) == 64


def test_what_cannot_be_is_refused():
    ring = Ring(128)
    assert not ring.fits(0) and not ring.fits(129)
    with pytest.raises(ValueError, match="do not fit"):
        ring.allocate(129)
    with pytest.raises(ValueError, match="no slot"):
        ring.free(0)
    with pytest.raises(ValueError, match="capacity"):
        Ring(-1)
    assert not Ring(0).fits(1)
