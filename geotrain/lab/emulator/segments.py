"""Single segments of an offloaded packet: how many there are, and the packet without some of them.

With segmentation offload the kernel hands over up to 64 KiB of TCP payload behind one set of
headers, and says in a virtio_net_hdr how to cut it. A wide-area link loses single segments, so the
lab takes those out and mends the headers, as the cutting itself would have:

    packet = virtio_net_hdr (10) | IP header | TCP header | payload of `gso_size` each
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

VNET_BYTES = 10
_VNET = struct.Struct("<BBHHHH")
"""flags, gso_type, hdr_len, gso_size, csum_start, csum_offset; in this machine's order."""
_NEEDS_CHECKSUM = 1
_GSO_NONE, _GSO_TCP_V4, _GSO_TCP_V6, _GSO_ECN = 0, 1, 4, 0x80
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


class Shape(NamedTuple):
    """What a packet holds, as a link sees it."""

    num_segments: int
    wire_bytes: int
    """With the headers of every segment."""
    header_bytes: int
    """IP and TCP; 0 where the packet is a single one, which needs no cutting."""
    gso_size: int


def shape_of(packet: bytes) -> Shape:
    """Of a packet as a TUN device gives it, virtio_net_hdr included."""
    num_bytes = len(packet) - VNET_BYTES
    gso_type = packet[1] & ~_GSO_ECN
    if gso_type not in (_GSO_TCP_V4, _GSO_TCP_V6):
        return Shape(1, num_bytes, 0, 0)
    gso_size = packet[4] | packet[5] << 8
    ip_bytes = _ip_bytes(packet)
    header_bytes = ip_bytes + (packet[VNET_BYTES + ip_bytes + 12] >> 4) * 4
    num_segments = max(1, -(-(num_bytes - header_bytes) // gso_size)) if gso_size else 1
    if num_segments == 1:
        return Shape(1, num_bytes, 0, 0)
    return Shape(
        num_segments, num_bytes + (num_segments - 1) * header_bytes, header_bytes, gso_size
    )


def without(packet: bytes, lost: Sequence[int], shape: Shape) -> list[bytes]:
    """The packets that are left when the segments with these indexes, ascending, are lost."""
    if not lost:
        return [packet]
    kept, first = [], 0
    for index in (*lost, shape.num_segments):
        if index > first:
            kept.append(run_of(packet, first, index, shape))
        first = index + 1
    return kept


def run_of(packet: bytes, first: int, last: int, shape: Shape) -> bytes:
    """Segments `first` to `last`, exclusive, as one packet that the kernel accepts as such."""
    if first == 0 and last == shape.num_segments:
        return packet
    start = VNET_BYTES + shape.header_bytes
    begin = start + first * shape.gso_size
    end = min(len(packet), start + last * shape.gso_size)
    part = bytearray(packet[:start])
    part += packet[begin:end]
    if last - first == 1:
        part[1] = _GSO_NONE
        part[4:6] = b"\0\0"
    tcp = VNET_BYTES + _ip_bytes(packet)
    _mend_ip(part, packet, first)
    sequence = struct.unpack_from("!I", packet, tcp + 4)[0] + first * shape.gso_size
    struct.pack_into("!I", part, tcp + 4, sequence & 0xFFFFFFFF)
    if first > 0:  # as the kernel's own cutting: CWR goes with the first segment,
        part[tcp + 13] &= ~_CWR & 0xFF
    if last < shape.num_segments:  # and what ends something with the last
        part[tcp + 13] &= ~(_FIN | _PSH) & 0xFF
    if part[0] & _NEEDS_CHECKSUM:
        _mend_partial_checksum(part, tcp, old=len(packet) - tcp, new=len(part) - tcp)
    return bytes(part)


def checksum(data: bytes | bytearray | memoryview, initial: int = 0) -> int:
    """The Internet checksum before its complement (RFC 1071)."""
    padded = bytes(data) + b"\0" * (len(data) % 2)
    return _fold(initial + sum(struct.unpack(f"!{len(padded) // 2}H", padded)))


def _ip_bytes(packet: bytes) -> int:
    return (packet[VNET_BYTES] & 15) * 4 if packet[VNET_BYTES] >> 4 == 4 else 40


def _mend_ip(part: bytearray, packet: bytes, first: int) -> None:
    num_bytes = len(part) - VNET_BYTES
    if packet[VNET_BYTES] >> 4 == 6:
        struct.pack_into("!H", part, VNET_BYTES + 4, num_bytes - 40)
        return
    number = struct.unpack_from("!H", packet, VNET_BYTES + 4)[0] + first
    struct.pack_into("!HH", part, VNET_BYTES + 2, num_bytes, number & 0xFFFF)
    struct.pack_into("!H", part, VNET_BYTES + 10, 0)
    header = memoryview(part)[VNET_BYTES : VNET_BYTES + _ip_bytes(packet)]
    total = checksum(header)
    header.release()
    struct.pack_into("!H", part, VNET_BYTES + 10, ~total & 0xFFFF)


def _mend_partial_checksum(part: bytearray, tcp: int, *, old: int, new: int) -> None:
    """The TCP field holds the sum of the pseudo-header, in which the length of this packet counts.

    What follows the field is summed by whoever cuts or sends the packet for good.
    """
    (total,) = struct.unpack_from("!H", part, tcp + 16)
    struct.pack_into("!H", part, tcp + 16, _fold(total + (~old & 0xFFFF) + new))


def _fold(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
