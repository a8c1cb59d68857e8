import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from geotrain.pipeline.microbatch import count_targets
from geotrain.pipeline.segment import Segment
from geotrain.pipeline.stage import LossSpec, Stage, Weight


class Checkpointed(nn.Module):
    """A dropout layer whose forward is computed again in the backward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def layers(recompute):
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)) for _ in range(3)]
    return [Checkpointed(layer) if recompute else layer for layer in made]


def make_stage(part, names, *, first, last, reduction="sum"):
    segment = Segment(list(zip(names, part, strict=True)))
    return Stage(
        segment,
        layer_names=names,
        first=first,
        last=last,
        loss=LossSpec(
            fn=lambda output, targets: nn.functional.cross_entropy(
                output, targets, reduction=reduction
            ),
            reduction=reduction,
            num_targets=count_targets,
        ),
        device=torch.device("cpu"),
        seed=11,
    )


def place(step=4, microbatch=2):
    return {"mode": "forward", "step": step, "microbatch": microbatch}


def run_split(at, *, recompute, inputs, targets, step=4):
    """Gradients of three layers cut in two stages after layer `at` (0: one stage)."""
    whole = layers(recompute)
    weight = Weight(num_targets=5.0)
    names = ["0", "1", "2"]
    if at == 0:
        stage = make_stage(whole, names, first=True, last=True)
        stage.forward(inputs, targets, weight=weight, **place(step))
        stage.backward([], **place(step))
    else:
        before = make_stage(whole[:at], names[:at], first=True, last=False)
        after = make_stage(whole[at:], names[at:], first=False, last=True)
        middle = before.forward(inputs, targets, weight=weight, **place(step))
        received = middle.detach().clone().requires_grad_()
        after.forward(received, targets, weight=weight, **place(step))
        grads, wanted = after.backward([], **place(step))
        assert wanted
        before.backward(grads, **place(step))
    return [parameter.grad for layer in whole for parameter in layer.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_dropout_and_recompute_do_not_depend_on_the_split(at, recompute):
    inputs, targets = torch.randn(5, 6), torch.randint(0, 6, (5,))
    one = run_split(0, recompute=False, inputs=inputs, targets=targets)
    two = run_split(at, recompute=recompute, inputs=inputs, targets=targets)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_another_step_draws_another_mask():
    inputs, targets = torch.randn(5, 6), torch.randint(0, 6, (5,))
    one = run_split(0, recompute=False, inputs=inputs, targets=targets, step=4)
    two = run_split(0, recompute=False, inputs=inputs, targets=targets, step=5)
    assert not torch.equal(one[0], two[0])


def test_the_callers_random_state_goes_on_as_if_nothing_had_run():
    torch.manual_seed(7)
    inputs, targets = torch.randn(5, 6), torch.randint(0, 6, (5,))
    torch.manual_seed(8)
    expected = torch.rand(1)
    torch.manual_seed(8)
    run_split(1, recompute=True, inputs=inputs, targets=targets)
    torch.manual_seed(8)
    assert torch.equal(torch.rand(1), expected)


def test_a_mean_over_no_targets_gives_no_loss_and_no_gradient():
    part = [nn.Linear(6, 6)]
    stage = make_stage(part, ["0"], first=False, last=True, reduction="mean")
    inputs = torch.randn(5, 6, requires_grad=True)
    targets = torch.full((5,), -100)
    stage.forward(inputs, targets, weight=Weight(num_targets=3.0), **place())
    grads, wanted = stage.backward([], **place())
    assert wanted and grads == [None]
    assert stage.loss_sum.item() == 0.0 and part[0].weight.grad is None


def test_a_frozen_first_stage_waits_for_no_gradient():
    part = [nn.Linear(6, 6).requires_grad_(False)]
    stage = make_stage(part, ["0"], first=True, last=False)
    output = stage.forward(torch.randn(5, 6), None, weight=Weight(num_targets=1.0), **place())
    assert not output.requires_grad
    assert not stage.is_held(2)


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def test_gradients_of_the_boundary_keep_the_strides_autograd_gave_them():
    stage = make_stage([Doubled()], ["0"], first=False, last=False)
    inputs = torch.randn(6, 5).t().requires_grad_()
    stage.forward(inputs, None, weight=Weight(num_targets=1.0), **place())
    gradient = torch.randn(5, 6)
    (grad,), _ = stage.backward([gradient], **place())
    assert torch.equal(grad, gradient * 2)
    # A leaf's own .grad would have been laid out like the leaf.
    assert grad.stride() == gradient.stride() != inputs.stride()
    assert inputs.grad is None


@pytest.mark.parametrize("inplace", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)])
def test_a_segment_may_change_its_input_in_place(inplace):
    """And the gradient is still that of what came in."""
    inputs = torch.randn(5, 6).requires_grad_()
    expected_input = inputs.detach().clone().requires_grad_()
    stage = make_stage([inplace], ["0"], first=False, last=False)
    output = stage.forward(inputs, None, weight=Weight(num_targets=1.0), **place())
    expected = inplace(expected_input * 1.0)
    gradient = torch.randn(5, 6)
    expected.backward(gradient)
    (grad,), _ = stage.backward([gradient], **place())
    assert torch.equal(output, expected) and torch.equal(grad, expected_input.grad)


def test_a_loss_that_is_not_one_number_is_refused():
    stage = make_stage([nn.Linear(6, 6)], ["0"], first=True, last=True, reduction="none")
    with pytest.raises(ValueError, match="one number"):
        stage.forward(
            torch.randn(5, 6), torch.zeros(5).long(), weight=Weight(num_targets=1.0), **place()
        )


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, False), (False, True)])
def test_nothing_of_a_microbatch_outlives_its_backward(first, last):
    """Without the collector: what waited for it would pile up, one graph a microbatch."""
    stage = make_stage([nn.Linear(6, 6)], ["0"], first=first, last=last)
    inputs = torch.randn(5, 6).requires_grad_(not first)
    targets = torch.zeros(5, dtype=torch.long)
    gc.collect()
    gc.disable()
    try:
        output = stage.forward(inputs, targets, weight=Weight(num_targets=5.0), **place())
        grads = [] if last else [torch.ones(5, 6)]
        watched = [weakref.ref(tensor) for tensor in (inputs, output) if tensor is not None]
        stage.backward(grads, **place())
        del inputs, output
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()
