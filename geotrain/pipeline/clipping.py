"""The global gradient norm and clipping, rounded as torch.nn.utils.clip_grad_norm_ does it.

Each region sends the norm of each of its gradients; all regions reduce the same list in the whole
model's order, so the clip factor is the one that a single process would have used, bit for bit.
"""

from collections.abc import Iterable, Sequence

import torch

from geotrain.pipeline.layout import DTYPES


def gradient_norms(
    parameters: Iterable[tuple[int, torch.nn.Parameter]],
) -> list[tuple[int, str, float]]:
    """2-norm of each gradient: (index of the parameter in the whole model, dtype, norm).

    Parameters without a gradient are left out, as clip_grad_norm_ leaves them out.
    """
    with_grad = [(index, p.grad) for index, p in parameters if p.grad is not None]
    if not with_grad:
        return []
    grads = [grad.detach() for _, grad in with_grad]
    if grads[0].device.type == "cpu":
        # The same kernels as get_total_norm: it takes the fused ones on accelerators only.
        norms = [torch.linalg.vector_norm(grad, 2.0) for grad in grads]
    else:
        norms = list(torch._foreach_norm(grads, 2.0))
    values = torch.stack([norm.double() for norm in norms]).tolist()
    return [
        (index, str(norm.dtype).removeprefix("torch."), value)
        for (index, _), norm, value in zip(with_grad, norms, values, strict=True)
    ]


def total_norm(norms: Sequence[tuple[str, float]]) -> torch.Tensor:
    """The global norm on the CPU: the 2-norm of the list of norms, in their own dtype."""
    if not norms:
        return torch.zeros(())
    tensors = [torch.tensor(value, dtype=DTYPES[dtype]) for dtype, value in norms]
    stacked = torch.stack([tensor.to(tensors[0].dtype) for tensor in tensors])
    total: torch.Tensor = torch.linalg.vector_norm(stacked, 2.0)
    return total


def clip(parameters: Iterable[torch.nn.Parameter], *, max_norm: float, total: torch.Tensor) -> None:
    """Scale the gradients in place so that the global norm is at most `max_norm`."""
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    if with_grad:
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, total.to(with_grad[0].device))
