"""The device half of every codec: a flat tensor to bytes on the same device, and back.

A codec has two halves. This one runs where the tensor lives and knows its dtype; the host half
(`host_zstd`) runs in the daemon and knows only bytes. What joins them is the hints: the byte ranges
that are worth a try by the host half.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from geotrain.compression.device_planes import (
    flat_bytes,
    join_planes,
    plane_hints,
    split_planes,
)
from geotrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTensor:
    """One tensor as bytes."""

    data: Tensor
    """uint8, one dimension, on the tensor's device. May share the tensor's memory."""
    hints: tuple[tuple[int, int], ...] = ()
    """(offset, length) byte ranges of `data` where the host half may pay, ascending and disjoint;
    it decides by a sample. Empty: send raw."""


class DeviceCodec(Protocol):
    """What every codec's device half can do. Stateless and thread-safe."""

    name: str

    def encode(self, flat: Tensor, out: Tensor | None = None) -> EncodedTensor:
        """Turn a tensor into bytes.

        Args:
            flat: Contiguous, one dimension, any dtype; left as it is.
            out: uint8, one dimension, exactly `encoded_bytes(dtype, numel)` long, on the same
                device (an arena slot, say): filled and returned as `data`, which then does not
                alias `flat`.
        """
        ...

    def decode(
        self, data: Tensor, dtype: torch.dtype, numel: int, out: Tensor | None = None
    ) -> Tensor:
        """Turn bytes back into a flat tensor of `numel` elements.

        Without `out` the result may share the memory of `data`.

        Raises:
            ValueError: `data` is not as long as `numel` elements of `dtype` need.
        """
        ...

    def encoded_bytes(self, dtype: torch.dtype, numel: int) -> int:
        """The length of `data`, known before encoding, so that a slot can be reserved."""
        ...


class NoneCodec:
    """The tensor's own bytes, nothing copied, nothing hinted."""

    name = "none"

    def encode(self, flat: Tensor, out: Tensor | None = None) -> EncodedTensor:
        data = flat_bytes(flat)
        return EncodedTensor(data=data if out is None else out.copy_(data))

    def decode(
        self, data: Tensor, dtype: torch.dtype, numel: int, out: Tensor | None = None
    ) -> Tensor:
        _check_length(data, dtype, numel)
        if out is not None:
            flat_bytes(out).copy_(data)
            return out
        # A view needs bytes that lie as the dtype wants them: arena slots do, others may not.
        width = dtype.itemsize
        misaligned = data.data_ptr() % width or data.storage_offset() % width
        return (data.clone() if misaligned else data).view(dtype)

    def encoded_bytes(self, dtype: torch.dtype, numel: int) -> int:
        return numel * dtype.itemsize


class PlanesCodec:
    """Byte j of every element side by side, so that exponents meet exponents. Lossless."""

    name = "planes"

    def encode(self, flat: Tensor, out: Tensor | None = None) -> EncodedTensor:
        hints = plane_hints(flat.dtype, flat.numel())
        return EncodedTensor(data=split_planes(flat, out), hints=hints)

    def decode(
        self, data: Tensor, dtype: torch.dtype, numel: int, out: Tensor | None = None
    ) -> Tensor:
        _check_length(data, dtype, numel)
        if out is None:
            out = torch.empty(numel, dtype=dtype, device=data.device)
        return join_planes(data, out)

    def encoded_bytes(self, dtype: torch.dtype, numel: int) -> int:
        return numel * dtype.itemsize


_CODECS: dict[str, DeviceCodec] = {codec.name: codec for codec in (NoneCodec(), PlanesCodec())}

CODEC_NAMES: tuple[str, ...] = tuple(_CODECS)
"""Every codec that this version can decode, for the handshake."""


def get_codec(name: str) -> DeviceCodec:
    """The codec of that name.

    Raises:
        ConfigError: There is none.
    """
    codec = _CODECS.get(name)
    if codec is None:
        known = ", ".join(CODEC_NAMES)
        raise ConfigError(f'run.compression: there is no codec "{name}"; the codecs are {known}')
    return codec


def _check_length(data: Tensor, dtype: torch.dtype, numel: int) -> None:
    wanted = numel * dtype.itemsize
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != wanted:
        raise ValueError(
            f"{numel} elements of {dtype} are {wanted} bytes; "
            f"got {data.dtype} of shape {tuple(data.shape)}"
        )
