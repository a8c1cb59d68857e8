import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.pipeline.layout import DTYPES, Layout, from_wire, to_wire


def roundtrip(tensor):
    flat, layout = to_wire(tensor)
    assert flat.stride() == (1,)
    again = Layout.from_record(layout.to_record())
    return from_wire(flat.clone(), again), layout


def assert_same(tensor, again):
    assert again.dtype == tensor.dtype and again.shape == tensor.shape
    assert torch.equal(bits(again), bits(tensor))


def bits(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    data=st.data(),
)
def test_values_and_strides_survive_for_permuted_sliced_and_expanded_tensors(shape, data):
    tensor = torch.arange(int(torch.tensor(shape or [1]).prod()), dtype=torch.float32)
    tensor = tensor.reshape(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
    if tensor.dim() and data.draw(st.booleans()):
        dim = data.draw(st.integers(0, tensor.dim() - 1))
        if tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 1, tensor.shape[dim] - 1)
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    again, _ = roundtrip(tensor)
    assert_same(tensor, again)
    if tensor.numel():
        assert again.stride() == tensor.stride()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype(dtype):
    tensor = torch.randint(0, 2, (3, 4), generator=torch.Generator().manual_seed(1)).to(dtype)
    again, _ = roundtrip(tensor.t())
    assert_same(tensor.t(), again)
    assert again.stride() == tensor.t().stride()


def test_an_expanded_tensor_travels_once():
    flat, layout = to_wire(torch.ones(1, 4).expand(1000, 4))
    assert flat.numel() == 4 and layout.numel == 4
    assert from_wire(flat, layout).stride() == (0, 1)


def test_wide_gaps_are_not_restored():
    tensor = torch.zeros(1000, 10)[:, 0]
    again, layout = roundtrip(tensor)
    assert layout.strides == (1,) and again.stride() == (1,)


def test_overlapping_windows_come_contiguous():
    tensor = torch.arange(10.0).unfold(0, 4, 1)
    again, _ = roundtrip(tensor)
    assert_same(tensor, again)


def test_requires_grad_travels():
    assert to_wire(torch.zeros(2, requires_grad=True))[1].requires_grad


@pytest.mark.parametrize(
    "record",
    [
        ["float31", [1], [1], False],
        ["float32", [1, 2], [1], False],
        ["float32", [-1], [1], False],
        ["float32", [1], [-1], False],
        ["float32", [1] * 40, [1] * 40, False],
        ["float32", [1], [1], 1],
        ["float32", [1.5], [1], False],
    ],
)
def test_a_layout_that_does_not_add_up_is_refused(record):
    with pytest.raises(ValueError, match="not a tensor layout"):
        Layout.from_record(record)


def test_a_hostile_stride_allocates_nothing():
    layout = Layout.from_record(["float32", [4], [1 << 50], False])
    assert from_wire(torch.arange(4.0), layout).tolist() == [0, 1, 2, 3]
