"""A tensor as the bytes of its storage order, and back with the very same strides.

Kernels choose their path, and with it their rounding, by strides. A boundary that delivered every
tensor contiguous would compute something else than one process, so strides travel in the header.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
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
    def numel(self) -> int:
        """Number of elements that travel."""
        return self.geometry.numel

    @property
    def geometry(self) -> "Geometry":
        """What follows from shape and strides."""
        return _geometry(self.shape, self.strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How the elements of a layout lie in memory."""

    sent_shape: tuple[int, ...]
    """The shape of what travels: one element along each expanded dimension (stride 0)."""
    numel: int
    order: tuple[int, ...]
    """The dimensions in storage order."""
    inverse: tuple[int, ...]
    """The way back from that order."""
    extent: int
    """Elements from the first to the last, gaps included."""
    is_restorable: bool
    """Whether the strides address every sent element once within a bounded extent."""


@lru_cache(maxsize=1024)
def _geometry(shape: tuple[int, ...], strides: tuple[int, ...]) -> Geometry:
    # A run has few layouts and asks for them with every tensor, on the thread that computes.
    pairs = list(zip(shape, strides, strict=True))
    sent_shape = tuple(1 if stride == 0 and size > 1 else size for size, stride in pairs)
    numel = math.prod(sent_shape)
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
    inverse = [0] * len(order)
    for position, dim in enumerate(order):
        inverse[dim] = position
    extent, overlaps = 1, False
    for dim in reversed(order):
        if sent_shape[dim] > 1:
            overlaps = overlaps or strides[dim] < extent
            extent = strides[dim] * (sent_shape[dim] - 1) + extent
    return Geometry(
        sent_shape=sent_shape,
        numel=numel,
        order=tuple(order),
        inverse=tuple(inverse),
        extent=extent,
        is_restorable=not overlaps and extent <= MAX_STRETCH * max(1, numel),
    )


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
    if not layout.geometry.is_restorable:
        detached = detached.contiguous()
        layout = Layout(
            dtype=layout.dtype,
            shape=layout.shape,
            strides=tuple(detached.stride()),
            requires_grad=layout.requires_grad,
        )
    compact, geometry = detached, layout.geometry
    for dim, size in enumerate(geometry.sent_shape):
        if size != layout.shape[dim]:
            compact = compact.narrow(dim, 0, 1)
    flat = compact.permute(geometry.order).contiguous().reshape(-1)
    if flat.stride() != (1,):  # torch calls a single element contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat, layout


def from_wire(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Rebuild a tensor from its elements in storage order; `flat` must own its memory.

    Returns:
        A tensor with the layout's shape and strides, without autograd history. It shares `flat`'s
        memory where the tensor is dense.
    """
    geometry, strides = layout.geometry, layout.strides
    sent_shape = geometry.sent_shape
    if geometry.is_restorable and geometry.extent == geometry.numel > 0:
        return flat.as_strided(layout.shape, strides)
    permuted = flat.reshape([sent_shape[dim] for dim in geometry.order]).permute(geometry.inverse)
    if geometry.numel == 0 or not geometry.is_restorable:
        return permuted.contiguous().expand(layout.shape)
    spread = flat.new_zeros(geometry.extent)
    spread.as_strided(sent_shape, strides).copy_(permuted)
    return spread.as_strided(layout.shape, strides)
