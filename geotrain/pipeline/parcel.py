"""One message of a boundary as bytes: a tree of tensors with its side inputs, packed and unpacked.

The header is a msgpack map that only the ranks read; the payload is the tensors' coded bytes, each
at an aligned offset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack
import torch

from geotrain.compression.codec import CODEC_NAMES, get_codec
from geotrain.compression.policy import Role, codec_name_for
from geotrain.pipeline.layout import DTYPES, Layout, from_wire, to_wire
from geotrain.pipeline.tree import TreeError, flatten, signature, unflatten
from geotrain.transport.messages import MAX_HINTS

ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 48 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """Which codec floating-point tensors travel in."""

    activations: str
    gradients: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A message ready to be copied into slots, whole or in parts."""

    header: bytes
    payload_bytes: int
    buffers: tuple[tuple[int, torch.Tensor], ...]
    """(offset in the payload, uint8 tensor of one dimension), ascending."""
    hints: tuple[tuple[int, int], ...] = ()
    """(offset, length) of what the host half of a codec may try."""
    signature: str = ""
    """Structure and dtypes of the tree, without shapes and without the side inputs."""

    def copy_range(self, first: int, out: torch.Tensor) -> None:
        """Copy the payload from byte `first` on into `out`, except the gaps between tensors."""
        last = first + out.numel()
        for offset, data in self.buffers:
            low, high = max(first, offset), min(last, offset + data.numel())
            if low < high:
                out[low - first : high - first].copy_(data[low - offset : high - offset])

    def hints_within(self, first: int, size: int) -> tuple[tuple[int, int], ...]:
        """The hints that fall into a part of the payload, relative to its start."""
        found = []
        for start, length in self.hints:
            low, high = max(first, start), min(first + size, start + length)
            if low < high:
                found.append((low - first, high - low))
        return tuple(sorted(sorted(found, key=_length, reverse=True)[:MAX_HINTS]))


def _length(hint: tuple[int, int]) -> int:
    return hint[1]


def pack_record(record: Mapping[str, Any]) -> Parcel:
    """A small map as a parcel."""
    body = msgpack.packb(dict(record))
    data = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    header = msgpack.packb({"bytes": len(body)})
    return Parcel(header=header, payload_bytes=len(body), buffers=((0, data),))


def unpack_record(data: bytes) -> dict[str, Any]:
    """Raises ValueError for anything but a msgpack map with str keys."""
    try:
        value = msgpack.unpackb(data, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.exceptions.UnpackException) as exc:
        raise ValueError("not a msgpack map") from exc
    if not isinstance(value, dict):
        raise ValueError("not a msgpack map")
    return value


def pack_tree(tree: Any, side: Any, *, role: Role, codecs: Codecs) -> Parcel:
    """Encode a tree and its side inputs, which are always lossless.

    Raises:
        TreeError: Something in it cannot cross a boundary.
    """
    num_main = len(flatten(tree, path="the segment's output")[1])
    spec, tensors = flatten((tree, side), path="the boundary")
    layouts: list[list[Any]] = []
    buffers: list[tuple[int, torch.Tensor]] = []
    hints: list[tuple[int, int]] = []
    offset = 0
    for index, tensor in enumerate(tensors):
        flat, layout = to_wire(tensor)
        if layout.dtype not in DTYPES:
            raise TreeError(f"a boundary carries no {layout.dtype}; cast it in the segment")
        name, _ = codec_name_for(
            role if index < num_main else "side",
            is_floating=tensor.is_floating_point() or tensor.is_complex(),
            activations=codecs.activations,
            gradients=codecs.gradients,
        )
        encoded = get_codec(name).encode(flat)
        size = encoded.data.numel()
        layouts.append([*layout.to_record(), name, offset, size])
        buffers.append((offset, encoded.data))
        hints += [(offset + start, length) for start, length in encoded.hints]
        offset = -(-(offset + size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    header = msgpack.packb({"tree": spec, "tensors": layouts, "bytes": offset})
    if len(header) > MAX_HEADER_BYTES:
        raise TreeError(
            f"{len(tensors)} tensors in one boundary need a header of {len(header)} bytes, the "
            f"limit is {MAX_HEADER_BYTES}: send fewer, larger tensors"
        )
    return Parcel(
        header=header,
        payload_bytes=offset,
        buffers=tuple(buffers),
        hints=tuple(hints),
        signature=signature(spec[1][0], [layout[0] for layout in layouts]),
    )


def as_bytes(view: memoryview) -> torch.Tensor:
    """The memory itself as a tensor of bytes; a copy where it must not be written to."""
    if len(view) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def announced_bytes(header: bytes) -> int:
    """The payload size that a header states. Raises ValueError."""
    size = unpack_record(header).get("bytes")
    if not isinstance(size, int) or size < 0:
        raise ValueError("a header without a size")
    return size


def unpack_tree(
    header: bytes, payload: torch.Tensor, *, device: torch.device
) -> tuple[Any, Any, str]:
    """Decode what `pack_tree` made; `payload` may be reused afterwards.

    Returns:
        The tree and its side inputs with fresh tensors on `device`, which require a gradient where
        the sender's did, and the tree's signature.

    Raises:
        ValueError: The message does not add up.
    """
    try:
        spec, contents = _read_header(header)
        tree, side = unflatten(spec, [_rebuild(payload, content, device) for content in contents])
        found = signature(spec[1][0], [content.layout.dtype for content in contents])
        return tree, side, found
    except (KeyError, TypeError, IndexError) as exc:
        raise ValueError(f"malformed header: {exc!r}") from exc


@dataclass(frozen=True, slots=True)
class _Content:
    """One tensor in a payload."""

    layout: Layout
    codec: str
    offset: int
    nbytes: int

    @classmethod
    def from_record(cls, record: Sequence[Any]) -> "_Content":
        *layout_record, codec, offset, nbytes = record
        layout = Layout.from_record(layout_record)
        is_placed = isinstance(offset, int) and isinstance(nbytes, int)
        if not (is_placed and offset >= 0 and nbytes >= 0):
            raise ValueError("a tensor without a place")
        if codec not in CODEC_NAMES:
            raise ValueError(f"a tensor in the unknown codec {codec!r}")
        return cls(layout, codec, offset, nbytes)


# Where shapes stay the same, so do the headers.
@lru_cache(maxsize=64)
def _read_header(header: bytes) -> tuple[Any, tuple[_Content, ...]]:
    """The tree's spec, which nobody may change, and what its tensors are."""
    fields = unpack_record(header)
    return fields["tree"], tuple(_Content.from_record(record) for record in fields["tensors"])


def _rebuild(payload: torch.Tensor, content: _Content, device: torch.device) -> torch.Tensor:
    layout, codec, offset, nbytes = content.layout, content.codec, content.offset, content.nbytes
    if offset + nbytes > payload.numel():
        raise ValueError(f"a tensor of {nbytes} bytes at {offset} in {payload.numel()} bytes")
    # Never the slot's own memory: on the CPU autograd would hold the slot until the backward.
    data = payload[offset : offset + nbytes].to(device)
    if codec == "none" and device.type == "cpu":
        data = data.clone()
    flat = get_codec(codec).decode(data, DTYPES[layout.dtype], layout.numel)
    return from_wire(flat, layout).requires_grad_(layout.requires_grad)
