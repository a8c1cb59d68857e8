"""The stage that sleeps: its time includes its own work, and what it passes on is real."""

import time

import pytest
import torch

from geotrain.lab.bench.stage import SleepModel, SleepStage


@pytest.mark.parametrize("requires_grad", [True, False])
def test_it_takes_its_time_and_passes_the_tensor_on(requires_grad):
    stage = SleepStage(forward_s=0.02, backward_s=0.01)
    x = torch.randn(3, requires_grad=requires_grad)
    began = time.monotonic()
    out = stage(x)
    forwarded = time.monotonic()
    assert forwarded - began >= 0.02
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
    grad = torch.tensor([3.0, 1.0, 2.0])
    out.backward(grad)
    assert time.monotonic() - forwarded >= 0.01
    assert stage.weight.grad == 3.0
    assert x.grad is None if not requires_grad else torch.equal(x.grad, grad)


def test_a_stage_keeps_its_name_in_its_region():
    model = SleepModel([0.0] * 3, [0.0] * 3)
    assert dict(model.only(1).named_parameters()).keys() == {"stages.1.weight"}


def test_no_time_is_no_sleep():
    out = SleepStage(forward_s=0.0, backward_s=0.0)(torch.ones(2))
    assert out.tolist() == [1.0, 1.0]
