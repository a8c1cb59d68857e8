"""Seeding as torch does it, without what torch does beside."""

import pytest
import torch
from torch import nn

from geotrain.pipeline.device import seed_generators


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_the_same_is_drawn_as_after_torchs_own_manual_seed(seed):
    device = torch.device("cpu")
    torch.manual_seed(seed)
    expected = [torch.rand(3), torch.randn(3), nn.functional.dropout(torch.ones(64))]
    seed_generators(seed, device)
    drawn = [torch.rand(3), torch.randn(3), nn.functional.dropout(torch.ones(64))]
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_its_own_generator_is_seeded_too():
    device = torch.device("cuda", 0)
    torch.manual_seed(5)
    expected = torch.rand(8, device=device)
    seed_generators(5, device)
    assert torch.equal(torch.rand(8, device=device), expected)
