"""The stage that sleeps: its time includes its own work, and what it passes on is real."""

import time

import pytest
import torch

from geotrain.lab.bench.options import Work
from geotrain.lab.bench.stage import Duration, SleepModel, SleepStage, make_batch


@pytest.mark.parametrize("requires_grad", [True, False])
def test_it_takes_its_time_and_passes_the_tensor_on(requires_grad):
    stage = SleepStage(forward=Duration(fixed_s=0.02), backward=Duration(fixed_s=0.01))
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


def test_the_last_stage_counts_its_loss_in():
    stage = SleepStage(
        forward=Duration(fixed_s=0.02), backward=Duration(fixed_s=0.01), is_last=True
    )
    x = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    began = time.monotonic()
    loss = stage.loss(stage(x), torch.tensor([2.0]))
    forwarded = time.monotonic()
    assert forwarded - began >= 0.02 and loss.item() == 6.0
    loss.backward()
    assert time.monotonic() - forwarded >= 0.01
    assert torch.equal(x.grad, torch.full((3,), 2.0 / 3)) and stage.weight.grad is not None


def test_a_stage_keeps_its_name_in_its_region():
    work = Work(
        forward_s=[0.0] * 3, backward_s=[0.0] * 3, boundary_bytes=8, num_microbatches=2, steps=2
    )
    model = SleepModel.of(work)
    assert dict(model.only(1).named_parameters()).keys() == {"stages.1.weight"}


def test_no_time_is_no_sleep():
    out = SleepStage(forward=Duration(fixed_s=0.0), backward=Duration(fixed_s=0.0))(torch.ones(2))
    assert out.tolist() == [1.0, 1.0]


def test_what_a_microbatch_takes_follows_its_samples():
    assert Duration(fixed_s=0.01, sample_s=0.002).of(torch.ones(4, 7)) == pytest.approx(0.018)


def test_a_batch_has_the_samples_asked_for_each_of_the_size_asked_for():
    work = Work(
        forward_s=[0.0] * 2,
        backward_s=[0.0] * 2,
        boundary_bytes=32,
        num_microbatches="auto",
        steps=2,
        num_samples=12,
    )
    x, target = make_batch(work)
    assert (x.shape, target.shape) == ((12, 8), (12, 1))
    assert (work.global_batch, work.first_count) == (12, 8)
