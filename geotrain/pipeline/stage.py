"""Forward and backward of one microbatch through this region's segment."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from geotrain.pipeline.device import seed_generators
from geotrain.pipeline.memory import ActivationMeter
from geotrain.pipeline.tree import flatten, unflatten

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """How the last region turns outputs and targets into what is minimised."""

    fn: LossFn
    reduction: Literal["sum", "mean"]
    num_targets: Callable[[Any], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """The gradient contract: what is differentiated is sum of losses * loss_scale / num_targets."""

    num_targets: float
    loss_scale: float = 1.0

    def apply(self, loss_sum: torch.Tensor) -> torch.Tensor:
        scaled = loss_sum if self.loss_scale == 1.0 else loss_sum * self.loss_scale
        return scaled / self.num_targets


@dataclass(slots=True)
class _Held:
    """What a microbatch keeps between its forward and its backward."""

    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    roots: list[torch.Tensor | None] = field(default_factory=list)
    """Outputs that need a gradient, None for the others; in the last region the loss alone."""
    is_awaited: bool = False
    """Whether the region before waits for gradients of the inputs."""


class _Boundary(torch.autograd.Function):
    """Where a received tensor enters the graph, and its gradient leaves it.

    Not a leaf: a segment may change its input in place, and the gradient is caught as autograd
    computed it, strides and all. A leaf's `.grad` would be laid out like the leaf, and the region
    before would then compute with other strides than one process does.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor, held: _Held, index: int
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.held, ctx.index = held, index
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None, None]:
        ctx.held.input_grads[ctx.index] = grad
        return None, None, None, None


class Stage:
    """This region's segment, one microbatch at a time.

    Random numbers in a layer depend on (run seed, step, microbatch, layer name) and on nothing
    else, so dropout does not depend on the split, and a recompute draws the same mask.
    """

    def __init__(
        self,
        segment: nn.Module,
        *,
        layer_names: Sequence[str],
        first: bool,
        last: bool,
        loss: LossSpec,
        device: torch.device,
        seed: int,
    ) -> None:
        self._segment = segment
        self._first = first
        self._last = last
        self._loss = loss
        self._device = device
        self._seed = seed
        self._draw_key: tuple[str, int, int] | None = None
        self._held: dict[int, _Held] = {}
        self.meter: ActivationMeter | None = None
        """Set by who wants to know what a microbatch in flight costs."""
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.num_targets = 0.0
        self._hooks = [
            segment.get_submodule(name).register_forward_pre_hook(self._seeding_hook(name))
            for name in layer_names
        ]

    def close(self) -> None:
        """Detach from the segment, so that the next pipeline may use it."""
        for hook in self._hooks:
            hook.remove()
        self._held.clear()

    def reset(self) -> None:
        """Start a step (or an evaluation): nothing is in flight, the sums are zero."""
        self._held.clear()
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self.num_targets = 0.0

    @property
    def num_held(self) -> int:
        """Microbatches that wait for their backward."""
        return len(self._held)

    def is_held(self, microbatch: int) -> bool:
        return microbatch in self._held

    def expects_gradient(self, microbatch: int) -> bool:
        """Whether the next region will send a gradient for what this microbatch put out."""
        if self._last:
            return False
        return any(root is not None for root in self._held[microbatch].roots)

    def forward(
        self, inputs: Any, targets: Any, *, mode: str, step: int, microbatch: int, weight: Weight
    ) -> Any:
        """Run one microbatch; keeps what its backward needs where gradients are enabled.

        Args:
            inputs: This region's inputs, fresh tensors that nothing else refers to.
            weight: What the last region scales the summed loss by.

        Returns:
            The output tree, or None in the last region.
        """
        held = _Held()
        if torch.is_grad_enabled() and not self._first:
            inputs = self._watch(inputs, held)
        with self._drawing(mode, step, microbatch), self._metering(microbatch):
            output = self._segment(inputs)
            if self._last:
                self._finish(output, targets, held, weight)
        if not self._last:
            held.roots = [t if t.requires_grad else None for t in flatten(output)[1]]
        if held.is_awaited or (
            torch.is_grad_enabled() and any(root is not None for root in held.roots)
        ):
            self._held[microbatch] = held
        return None if self._last else output

    def _metering(self, microbatch: int) -> AbstractContextManager[None]:
        # One of a step is enough to know what each of them costs.
        if self.meter is None or microbatch != 0 or not torch.is_grad_enabled():
            return nullcontext()
        return self.meter.measuring()

    def _watch(self, inputs: Any, held: _Held) -> Any:
        """Make inputs that need a gradient part of the graph, and have their gradients caught."""
        spec, tensors = flatten(inputs)
        held.input_grads = [None] * len(tensors)
        held.is_awaited = any(tensor.requires_grad for tensor in tensors)
        return unflatten(spec, [self._enter(t, i, held) for i, t in enumerate(tensors)])

    def _enter(self, tensor: torch.Tensor, index: int, held: _Held) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        entered: torch.Tensor = _Boundary.apply(self._anchor, tensor.detach(), held, index)  # type: ignore[no-untyped-call]  # torch leaves it so
        return entered

    def _finish(self, output: Any, targets: Any, held: _Held, weight: Weight) -> None:
        count = self._loss.num_targets(targets)
        loss = self._loss.fn(output, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return one number in a tensor, not {found}")
        self.num_targets += count
        if self._loss.reduction == "mean":
            if count == 0:
                return  # the mean over nothing is NaN: no loss, no gradient
            loss = loss * count
        self.loss_sum += loss.detach().double().reshape(())
        if loss.requires_grad:
            held.roots = [weight.apply(loss)]

    def backward(
        self, grads: Sequence[torch.Tensor | None], *, mode: str, step: int, microbatch: int
    ) -> tuple[list[torch.Tensor | None], bool]:
        """Run one microbatch's backward.

        Args:
            grads: Gradient of each output tensor, None where there is none; empty where the next
                region sends none at all.

        Returns:
            Gradient of each input tensor, None where it needs none or none flowed; and whether the
            region before waits for them.
        """
        held = self._held.pop(microbatch)
        with self._drawing(mode, step, microbatch):
            if self._last:
                roots = [root for root in held.roots if root is not None]
                if roots:
                    torch.autograd.backward(roots)
            elif grads:
                pairs = [
                    (root, grad)
                    for root, grad in zip(held.roots, grads, strict=True)
                    if root is not None and grad is not None
                ]
                if pairs:
                    torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        # The graph holds `held`, which holds the graph: a cycle through C++ that the collector
        # finds late, if at all.
        held.roots.clear()
        return held.input_grads, held.is_awaited

    @contextmanager
    def _drawing(self, mode: str, step: int, microbatch: int) -> Iterator[None]:
        """Random numbers inside depend on the place in the run; outside they go on as before."""
        cpu_state = torch.get_rng_state()
        cuda = self._device.type == "cuda"
        cuda_state = torch.cuda.get_rng_state(self._device) if cuda else None
        self._draw_key = (mode, step, microbatch)
        try:
            yield
        finally:
            self._draw_key = None
            torch.set_rng_state(cpu_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state, self._device)

    def _seeding_hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def seed(module: nn.Module, args: Any) -> None:
            # Read from the object, not from a thread-local: on CUDA a recompute runs on a thread
            # of autograd's own.
            if self._draw_key is not None:
                seed_generators(draw_seed(self._seed, *self._draw_key, name), self._device)

        return seed


def draw_seed(seed: int, mode: str, step: int, microbatch: int, layer: str) -> int:
    """The seed of a layer's random numbers at one place in the run."""
    digest = hashlib.sha256(f"{seed}/{mode}/{step}/{microbatch}/{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % 2**63
