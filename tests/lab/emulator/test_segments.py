"""Taking single segments out of an offloaded packet."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.lab.emulator.segments import run_of, shape_of, without
from tests.lab.emulator.packets import ACK, CWR, FIN, PSH, packet, segments_of

PACKETS = st.builds(
    packet,
    st.integers(1, 12_000),
    gso_size=st.integers(500, 1448),
    flags=st.sampled_from([ACK, ACK | PSH, ACK | FIN, ACK | CWR | PSH]),
    sequence=st.integers(0, 2**32 - 1),
    version=st.sampled_from([4, 6]),
    options=st.sampled_from([0, 12, 40]),
    number=st.integers(1, 60_000),
)


def test_a_full_packet_counts_the_headers_of_every_segment():
    shape = shape_of(packet(45 * 1448))
    assert shape.num_segments == 45
    assert shape.wire_bytes == 45 * 1500


def test_a_single_packet_needs_no_cutting():
    data = packet(1000)
    assert shape_of(data) == (1, 1052, 0, 0)
    assert without(data, [0], shape_of(data)) == []
    assert without(data, [], shape_of(data)) == [data]


@given(PACKETS, st.data())
def test_what_is_left_is_exactly_what_was_not_lost(data, draw):
    shape = shape_of(data)
    lost = sorted(draw.draw(st.sets(st.integers(0, shape.num_segments - 1))))
    original = segments_of(data)
    assert len(original) == shape.num_segments
    left = [part for kept in without(data, lost, shape) for part in segments_of(kept)]
    assert left == [part for index, part in enumerate(original) if index not in lost]


@given(PACKETS)
def test_parts_weigh_together_what_the_whole_weighs(data):
    shape = shape_of(data)
    middle = shape.num_segments // 2
    parts = [run_of(data, 0, middle, shape)] if middle else []
    parts.append(run_of(data, middle, shape.num_segments, shape))
    assert sum(shape_of(part).wire_bytes for part in parts) == shape.wire_bytes
    assert sum(shape_of(part).num_segments for part in parts) == shape.num_segments


def test_a_packet_that_loses_nothing_is_the_same_object():
    data = packet(10_000)
    assert run_of(data, 0, 7, shape_of(data)) is data


@pytest.mark.parametrize("seed", range(3))
def test_other_packets_are_single_ones(seed):
    noise = random.Random(seed).randbytes(60)
    assert shape_of(bytes(10) + noise).num_segments == 1
