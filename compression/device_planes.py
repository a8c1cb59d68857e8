"""Byte planes: byte j of every element side by side, split and joined on the tensor's device.

A *word* is the unit that is split: an element, or one component of a complex element. Plane j holds
byte j (little-endian, so the last plane has sign and exponent) of all words; dtypes of one byte are
their own only plane. Only bytes are moved, so every bit pattern survives.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Words = npt.NDArray[Any]

_CHUNK_BYTES = 1 << 18
"""Words split at a time on the CPU; with the scratch it stays inside one core's L2."""

MIN_HINT_BYTES = 512
"""Shorter ranges are not hinted: the host half would decline them anyway."""

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def flat_bytes(flat: Tensor) -> Tensor:
    """The bytes of a contiguous one-dimensional tensor, as a view."""
    assert flat.dim() == 1 and flat.is_contiguous(), (
        "codecs take contiguous tensors of one dimension"
    )
    return flat.detach().view(torch.uint8)


def word_bytes(dtype: torch.dtype) -> int:
    """Bytes of one word, and so the number of planes."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def plane_hints(dtype: torch.dtype, numel: int) -> tuple[tuple[int, int], ...]:
    """The byte range that the host half should try: the plane with sign and exponent of floats;
    everything of integers, whose high planes are mostly zero, and of one-byte dtypes.

    Chosen from dtype and length alone. Whether it pays depends on the values, and to look at them
    here would make the training thread wait for an accelerator; the host half looks, at a sample,
    chunk by chunk. The lower planes of floats are noise, not worth a look.
    """
    nbytes = numel * dtype.itemsize
    is_float = dtype.is_floating_point or dtype.is_complex
    tried_bytes = nbytes // word_bytes(dtype) if is_float else nbytes
    if tried_bytes < MIN_HINT_BYTES:
        return ()
    return ((nbytes - tried_bytes, tried_bytes),)


def split_planes(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """Reorder a tensor's bytes by plane, into `out` (uint8, of the same length) where given.

    Without `out` a tensor of one-byte words is returned as a view of itself.
    """
    data = flat_bytes(flat)
    num_planes = word_bytes(flat.dtype)
    if num_planes == 1:
        return data if out is None else out.copy_(data)
    planes = torch.empty_like(data) if out is None else out
    if data.device.type == "cpu":
        _split_on_cpu(data.numpy(), planes.numpy(), num_planes)
    else:
        planes.view(num_planes, -1).copy_(data.view(-1, num_planes).t())
    return planes


def join_planes(planes: Tensor, out: Tensor) -> Tensor:
    """Undo `split_planes`: fill `out`, a contiguous one-dimensional tensor of the first dtype."""
    data = flat_bytes(out)
    num_planes = word_bytes(out.dtype)
    if num_planes == 1:
        data.copy_(planes)
    elif data.device.type == "cpu":
        _join_on_cpu(planes.numpy(), data.numpy(), num_planes)
    else:
        data.view(-1, num_planes).copy_(planes.view(num_planes, -1).t())
    return out


# On the CPU a transposing copy goes byte by byte (0.3 GB/s). Narrowing and widening whole words is
# vectorised, so words are halved again and again: u32 -> two u16 -> four u8. numpy, because its
# casting copies are faster than torch's and start no threads.


class _Scratch:
    """Words of one width on their way, and their two halves; allocated once per call."""

    def __init__(self, num_words: int, width: int) -> None:
        self.shifted: _Words = np.empty(num_words, _UNSIGNED[width])
        self.half = width // 2
        self.bits = self.half * 8
        self.inner = _Scratch(num_words, self.half) if self.half > 1 else None
        if self.inner is not None:
            self.low: _Words = np.empty(num_words, _UNSIGNED[self.half])
            self.high: _Words = np.empty(num_words, _UNSIGNED[self.half])

    def split(self, words: _Words, planes: _Words) -> None:
        """words (n,) -> planes (width, n), uint8."""
        n = words.size
        low, high = (planes[0], planes[1]) if self.inner is None else (self.low[:n], self.high[:n])
        np.copyto(low, words, casting="unsafe")  # keeps the low half
        np.right_shift(words, self.bits, out=self.shifted[:n])
        np.copyto(high, self.shifted[:n], casting="unsafe")
        if self.inner is not None:
            self.inner.split(low, planes[: self.half])
            self.inner.split(high, planes[self.half :])

    def join(self, planes: _Words, words: _Words) -> None:
        """planes (width, n), uint8 -> words (n,)."""
        n = words.size
        low, high = (planes[0], planes[1]) if self.inner is None else (self.low[:n], self.high[:n])
        if self.inner is not None:
            self.inner.join(planes[: self.half], low)
            self.inner.join(planes[self.half :], high)
        np.copyto(words, high)
        np.left_shift(words, self.bits, out=words)
        np.copyto(self.shifted[:n], low)
        np.bitwise_or(words, self.shifted[:n], out=words)


def _split_on_cpu(data: _Words, out: _Words, num_planes: int) -> None:
    words = data.view(_UNSIGNED[num_planes])
    planes = out.reshape(num_planes, words.size)
    chunk = min(_CHUNK_BYTES // num_planes, words.size)
    scratch = _Scratch(chunk, num_planes)
    for start in range(0, words.size, max(chunk, 1)):
        scratch.split(words[start : start + chunk], planes[:, start : start + chunk])


def _join_on_cpu(planes_flat: _Words, out: _Words, num_planes: int) -> None:
    words = out.view(_UNSIGNED[num_planes])
    planes = planes_flat.reshape(num_planes, words.size)
    chunk = min(_CHUNK_BYTES // num_planes, words.size)
    scratch = _Scratch(chunk, num_planes)
    for start in range(0, words.size, max(chunk, 1)):
        scratch.join(planes[:, start : start + chunk], words[start : start + chunk])
