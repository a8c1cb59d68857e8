"""A tensor as the bytes of its storage order, and back with the very same strides.

Kernels choose their path, and with it their rounding, by strides. A boundary that delivered every
tensor contiguous would compute something else than one process, so strides travel in the header.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}

MAX_DIMS = 16
MAX_STRETCH = 4
"""A receiver restores strides with gaps only up to this many times the tensor's own size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a receiver needs to rebuild one tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    def to_record(self) -> list[Any]:
        return [self.dtype, list(self.shape), list(self.strides), self.requires_grad]

    @classmethod
    def from_record(cls, record: Any) -> "Layout":
        """Validate a peer's description. Raises ValueError for anything that does not add up."""
        dtype, shape, strides, requires_grad = record
        sizes_are_sane = (
            len(shape) == len(strides) <= MAX_DIMS
            and all(isinstance(size, int) and size >= 0 for size in shape)
            and all(isinstance(stride, int) and stride >= 0 for stride in strides)
        )
        if dtype not in DTYPES or not sizes_are_sane or not isinstance(requires_grad, bool):
            raise ValueError(f"not a tensor layout: {record!r}")
        return cls(
            dtype=dtype, shape=tuple(shape), strides=tuple(strides), requires_grad=requires_grad
        )

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of what travels: one element along each expanded dimension (stride 0)."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(1 if stride == 0 and size > 1 else size for size, stride in pairs)

    @property
    def numel(self) -> int:
        """Number of elements that travel."""
        return math.prod(self.sent_shape)


def _storage_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))


def _restorable(layout: Layout) -> bool:
    """Whether these strides address every sent element once within a bounded extent."""
    shape, strides = layout.sent_shape, layout.strides
    extent = 1
    for dim in reversed(_storage_order(shape, strides)):
        if shape[dim] > 1:
            if strides[dim] < extent:
                return False
            extent = strides[dim] * (shape[dim] - 1) + extent
    return extent <= MAX_STRETCH * max(1, layout.numel)


def to_wire(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """The elements of `tensor` in storage order, and the layout to restore it.

    Returns:
        A contiguous 1-D tensor on the same device (a view where the tensor is dense), and the
        layout. Expanded dimensions travel once.
    """
    detached = tensor.detach().resolve_conj().resolve_neg()
    layout = Layout(
        dtype=str(detached.dtype).removeprefix("torch."),
        shape=tuple(detached.shape),
        strides=tuple(detached.stride()),
        requires_grad=tensor.requires_grad,
    )
    if not _restorable(layout):
        detached = detached.contiguous()
        layout = Layout(
            dtype=layout.dtype,
            shape=layout.shape,
            strides=tuple(detached.stride()),
            requires_grad=layout.requires_grad,
        )
    compact = detached
    for dim, size in enumerate(layout.sent_shape):
        if size != layout.shape[dim]:
            compact = compact.narrow(dim, 0, 1)
    order = _storage_order(layout.sent_shape, layout.strides)
    flat = compact.permute(order).contiguous().reshape(-1)
    if flat.stride() != (1,):  # torch calls a single element contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat, layout


def from_wire(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Rebuild a tensor from its elements in storage order; `flat` must own its memory.

    Returns:
        A tensor with the layout's shape and strides, without autograd history. It shares `flat`'s
        memory where the tensor is dense.
    """
    sent_shape, strides = layout.sent_shape, layout.strides
    order = _storage_order(sent_shape, strides)
    inverse = [0] * len(order)
    for position, dim in enumerate(order):
        inverse[dim] = position
    permuted = flat.reshape([sent_shape[dim] for dim in order]).permute(inverse)
    if layout.numel == 0 or not _restorable(layout):
        return permuted.contiguous().expand(layout.shape)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sent_shape, strides, strict=True))
    if extent == layout.numel:
        return flat.as_strided(layout.shape, strides)
    spread = flat.new_zeros(extent)
    spread.as_strided(sent_shape, strides).copy_(permuted)
    return spread.as_strided(layout.shape, strides)
