"""Where each byte goes, and which bytes are proposed to the host half."""

import pytest
import torch

from geotrain.compression.device_planes import plane_hints, split_planes, word_bytes


@pytest.mark.parametrize(
    ("dtype", "num_planes"),
    [
        (torch.bool, 1),
        (torch.float8_e5m2, 1),
        (torch.bfloat16, 2),
        (torch.int32, 4),
        (torch.float64, 8),
        (torch.complex64, 4),  # two words of four bytes an element
        (torch.complex128, 8),
    ],
)
def test_plane_j_holds_byte_j_of_every_word(dtype, num_planes):
    assert word_bytes(dtype) == num_planes
    raw = torch.arange(240, dtype=torch.uint8)
    planes = split_planes(raw.view(dtype))
    assert torch.equal(planes.view(num_planes, -1), raw.view(-1, num_planes).t())


def test_one_byte_words_are_not_copied():
    flat = torch.arange(10, dtype=torch.int8)
    assert split_planes(flat).data_ptr() == flat.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "hints"),
    [
        (torch.bfloat16, ((1024, 1024),)),
        (torch.float16, ((1024, 1024),)),
        (torch.float32, ((3072, 1024),)),
        (torch.float64, ((7168, 1024),)),
        (torch.complex64, ((6144, 2048),)),
        (torch.int64, ((0, 8192),)),
        (torch.bool, ((0, 1024),)),
    ],
)
def test_hints_are_the_exponents_of_floats_and_all_of_integers(dtype, hints):
    assert plane_hints(dtype, 1024) == hints


def test_a_float8_tensor_is_all_one_plane():
    assert plane_hints(torch.float8_e4m3fn, 1024) == ((0, 1024),)


def test_short_planes_are_not_proposed():
    assert plane_hints(torch.bfloat16, 511) == ()
    assert plane_hints(torch.bfloat16, 512) == ((512, 512),)
    assert plane_hints(torch.bfloat16, 0) == ()
