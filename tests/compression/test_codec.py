"""Every codec gives back every bit of every dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.compression.codec import CODEC_NAMES, get_codec
from geotrain.errors import ConfigError

DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)
SPECIAL = (0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e-45, 3.4e38)

every_codec = pytest.mark.parametrize("name", CODEC_NAMES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def of_bytes(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern as a tensor: NaN payloads, subnormals and all."""
    if not raw:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype)


def bits(flat: torch.Tensor) -> bytes:
    return bytes(flat.view(torch.uint8).tolist())


@every_codec
@every_dtype
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_bit_pattern_comes_back(name, dtype, data):
    numel = data.draw(st.integers(0, 40))
    raw = data.draw(st.binary(min_size=numel * dtype.itemsize, max_size=numel * dtype.itemsize))
    codec = get_codec(name)
    flat = of_bytes(raw, dtype)
    encoded = codec.encode(flat)
    assert encoded.data.numel() == codec.encoded_bytes(dtype, numel)
    decoded = codec.decode(encoded.data, dtype, numel)
    assert decoded.dtype == dtype and decoded.shape == (numel,)
    assert bits(decoded) == raw
    assert bits(flat) == raw


@every_codec
@every_dtype
@pytest.mark.parametrize("nbytes", (1 << 18, (1 << 18) + 16, (1 << 19) - 16))
def test_lengths_around_the_chunk_size_come_back(name, dtype, nbytes):
    generator = torch.Generator().manual_seed(nbytes)
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    numel = nbytes // dtype.itemsize
    codec = get_codec(name)
    encoded = codec.encode(raw.view(dtype)).data.clone()
    assert torch.equal(codec.decode(encoded, dtype, numel).view(torch.uint8), raw)


@every_codec
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_special_values_come_back(name, dtype):
    flat = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    codec = get_codec(name)
    decoded = codec.decode(codec.encode(flat).data, dtype, flat.numel())
    assert bits(decoded) == bits(flat)


@every_codec
@every_dtype
def test_given_memory_is_filled_and_shares_nothing_with_the_source(name, dtype):
    codec = get_codec(name)
    raw = bytes(range(64)) * dtype.itemsize
    flat = of_bytes(raw, dtype)
    slot = torch.full((len(raw),), 255, dtype=torch.uint8)
    encoded = codec.encode(flat, slot)
    assert encoded.data.data_ptr() == slot.data_ptr()
    out = torch.empty_like(flat)
    flat.view(torch.uint8).zero_()
    assert codec.decode(slot, dtype, flat.numel(), out) is out
    assert bits(out) == raw


@every_codec
@every_dtype
def test_bytes_at_an_odd_address_decode(name, dtype):
    codec = get_codec(name)
    raw = bytes(range(48)) * dtype.itemsize
    encoded = codec.encode(of_bytes(raw, dtype)).data
    room = torch.zeros(len(raw) + 1, dtype=torch.uint8)
    room[1:] = encoded
    assert bits(codec.decode(room[1:], dtype, 48)) == raw


def test_a_parameter_encodes_without_a_graph():
    flat = torch.nn.Parameter(torch.arange(8.0))
    for name in CODEC_NAMES:
        encoded = get_codec(name).encode(flat)
        assert not encoded.data.requires_grad


def test_none_is_a_view_without_hints():
    flat = torch.arange(1000.0)
    encoded = get_codec("none").encode(flat)
    assert encoded.data.data_ptr() == flat.data_ptr()
    assert encoded.hints == ()
    decoded = get_codec("none").decode(encoded.data, torch.float32, 1000)
    assert decoded.data_ptr() == flat.data_ptr()


@every_codec
@pytest.mark.parametrize("nbytes", (0, 7, 9, 16))
def test_bytes_of_another_length_are_refused(name, nbytes):
    with pytest.raises(ValueError, match=r"2 elements of torch\.float32 are 8 bytes"):
        get_codec(name).decode(torch.zeros(nbytes, dtype=torch.uint8), torch.float32, 2)


def test_an_unknown_codec_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match='no codec "zip"; the codecs are none, planes'):
        get_codec("zip")
