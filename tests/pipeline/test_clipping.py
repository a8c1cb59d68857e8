import pytest
import torch
from torch import nn

from geotrain.pipeline.clipping import clip, gradient_norms, total_norm


def parameters_with_gradients(dtype, num=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(num):
        parameter = nn.Parameter(torch.zeros(index + 1, 7, dtype=dtype))
        if index % 9:
            parameter.grad = torch.randn(index + 1, 7, generator=generator).to(dtype)
        made.append(parameter)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
@pytest.mark.parametrize("cut", [0, 13, 40])
def test_regions_together_clip_bit_for_bit_like_one_process(dtype, max_norm, cut):
    one, many = parameters_with_gradients(dtype), parameters_with_gradients(dtype)
    expected = torch.nn.utils.clip_grad_norm_(one, max_norm)
    indexed = list(enumerate(many))
    norms = gradient_norms(indexed[cut:]) + gradient_norms(indexed[:cut])
    ordered = [(name, norm) for _, name, norm in sorted(norms)]
    total = total_norm(ordered)
    assert torch.equal(total, expected) and total.dtype == expected.dtype
    for part in (many[:cut], many[cut:]):
        clip(part, max_norm=max_norm, total=total)
    for a, b in zip(one, many, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert torch.equal(a.grad, b.grad)


def test_nothing_to_clip():
    assert gradient_norms([(0, nn.Parameter(torch.zeros(2)))]) == []
    assert float(total_norm([])) == 0.0
