import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.pipeline.parcel import (
    Codecs,
    announced_bytes,
    pack_record,
    pack_tree,
    unpack_record,
    unpack_tree,
)
from geotrain.pipeline.tree import TreeError

CPU = torch.device("cpu")
PLANES = Codecs(activations="planes", gradients="planes")


def payload_of(parcel, part_bytes=None):
    payload = torch.zeros(parcel.payload_bytes, dtype=torch.uint8)
    step = part_bytes or max(1, parcel.payload_bytes)
    for first in range(0, parcel.payload_bytes, step):
        parcel.copy_range(first, payload[first : first + step])
    return payload


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    codec=st.sampled_from(["none", "planes"]),
    part_bytes=st.integers(1, 70),
)
def test_trees_come_back_bit_for_bit_whole_or_in_parts(shapes, dtype, codec, part_bytes):
    tensors = [torch.randint(0, 9, shape).to(dtype) for shape in shapes]
    tree = (tensors, None, {"scale": 0.1})
    parcel = pack_tree(
        tree, tensors[0], role="activation", codecs=Codecs(activations=codec, gradients="none")
    )
    payload = payload_of(parcel, part_bytes)
    again, side, signature = unpack_tree(parcel.header, payload, device=CPU)
    payload.fill_(255)
    assert signature == parcel.signature
    assert torch.equal(side, tensors[0]) and again[1] is None and again[2] == {"scale": 0.1}
    for tensor, back in zip(tensors, again[0], strict=True):
        assert back.dtype == dtype and torch.equal(back, tensor)


def test_a_dtype_that_does_not_travel_is_named_at_the_sender():
    with pytest.raises(TreeError, match="carries no uint16"):
        pack_tree(torch.zeros(2, dtype=torch.uint16), None, role="activation", codecs=PLANES)


def test_records_come_back():
    parcel = pack_record({"call": "step", "n": 3.5})
    assert announced_bytes(parcel.header) == parcel.payload_bytes
    assert unpack_record(bytes(payload_of(parcel).tolist())) == {"call": "step", "n": 3.5}


def test_hints_of_a_part_are_relative_to_it():
    parcel = pack_tree(
        torch.zeros(4096, dtype=torch.bfloat16), None, role="activation", codecs=PLANES
    )
    assert parcel.hints
    whole = {byte for start, length in parcel.hints for byte in range(start, start + length)}
    parts = set()
    for first in range(0, parcel.payload_bytes, 1000):
        size = min(1000, parcel.payload_bytes - first)
        for start, length in parcel.hints_within(first, size):
            assert 0 <= start and start + length <= size
            parts |= set(range(first + start, first + start + length))
    assert parts == whole


@given(st.data())
def test_a_damaged_header_is_refused_and_nothing_else(data):
    tree = (torch.arange(6.0), torch.arange(3))
    parcel = pack_tree(tree, None, role="activation", codecs=PLANES)
    header = bytearray(parcel.header)
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpack_tree(bytes(header), payload_of(parcel), device=CPU)
    except ValueError:
        pass


@given(st.binary(max_size=64))
def test_junk_is_refused_and_nothing_else(junk):
    with pytest.raises(ValueError):
        announced_bytes(junk)
    with pytest.raises(ValueError):
        unpack_tree(junk, torch.zeros(8, dtype=torch.uint8), device=CPU)
