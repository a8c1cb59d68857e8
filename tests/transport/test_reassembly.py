from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.transport.messages import Message
from geotrain.transport.reassembly import Incoming, Ranges

EDGES = st.integers(0, 40)
OPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "pop"]), EDGES, EDGES))


@given(OPS, EDGES, EDGES)
def test_ranges_behave_as_a_set_of_integers(ops, low, high):
    ranges, numbers = Ranges(), set()
    for op, start, end in ops:
        if op == "add":
            ranges.add(start, end)
            numbers |= set(range(start, end))
        elif op == "remove":
            ranges.remove(start, end)
            numbers -= set(range(start, end))
        elif start and (taken := ranges.pop_first(start)) is not None:
            assert taken[0] == min(numbers) and taken[1] - taken[0] <= start
            numbers -= set(range(*taken))
        told = list(ranges)
        assert all(one[1] < other[0] for one, other in pairwise(told))
        assert {n for start, end in told for n in range(start, end)} == numbers
    assert ranges.total == len(numbers)
    wanted = set(range(low, high))
    if wanted:
        assert ranges.covers(low, high) == (wanted <= numbers)
        assert ranges.overlaps(low, high) == bool(wanted & numbers)
    assert set(ranges.missing(20)) == set(Ranges((n, n + 1) for n in set(range(20)) - numbers))
    assert ranges == Ranges(list(ranges))


def _incoming(payload_bytes: int) -> Incoming:
    return Incoming(
        Message(
            stream=0, view=1, seq=0, kind="x", step=0, microbatch=0, payload_bytes=payload_bytes
        )
    )


def test_message_is_complete_when_every_byte_is_verified():
    incoming = _incoming(10)
    incoming.received.add(0, 6)
    incoming.pending.add(6, 10)
    assert not incoming.complete
    assert incoming.arrived().covers(0, 10)
    incoming.received.add(6, 10)
    assert incoming.complete
    assert _incoming(0).complete


def test_chunk_is_wanted_known_or_wrong():
    incoming = _incoming(10)
    incoming.received.add(0, 3)
    incoming.pending.add(3, 6)
    assert incoming.wants(6, 10)
    assert not incoming.wants(1, 5)
    with pytest.raises(ValueError, match="in part"):
        incoming.wants(5, 7)
    with pytest.raises(ValueError, match="of 10 bytes"):
        incoming.wants(6, 11)
