"""TCP packets as a TUN device gives them, and what the kernel makes of them, for the tests."""

import ipaddress
import struct
from dataclasses import dataclass

from geotrain.lab.emulator.segments import VNET_BYTES, checksum

FIN, SYN, PSH, ACK, CWR = 0x01, 0x02, 0x08, 0x10, 0x80
_ADDRESSES = {4: ("10.77.0.1", "10.77.0.2"), 6: ("fd00::1", "fd00::2")}


def packet(
    num_bytes: int,
    *,
    gso_size: int = 1448,
    flags: int = ACK,
    sequence: int = 1000,
    version: int = 4,
    options: int = 12,
    ports: tuple[int, int] = (40_000, 9_000),
    number: int = 7,
) -> bytes:
    """A packet of `num_bytes` payload, each byte its own position; offloaded where it is longer."""
    payload = bytes(index % 251 for index in range(num_bytes))
    tcp_bytes = 20 + options
    near, far = (ipaddress.ip_address(text).packed for text in _ADDRESSES[version])
    pseudo = near + far + struct.pack("!II", tcp_bytes + num_bytes, 6)
    tcp = struct.pack("!HHIIBBHHH", *ports, sequence, 1, tcp_bytes // 4 << 4, flags, 512, 0, 0)
    tcp = bytearray(tcp + bytes(options))
    struct.pack_into("!H", tcp, 16, checksum(pseudo))  # partial: the sum of the pseudo-header
    if version == 4:
        length = 20 + len(tcp) + num_bytes
        ip = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, length, number, 0x4000, 64, 6, 0))
        ip += near + far
        struct.pack_into("!H", ip, 10, ~checksum(ip) & 0xFFFF)
        kind = 1
    else:
        ip = bytearray(struct.pack("!IHBB", 6 << 28, len(tcp) + num_bytes, 6, 64) + near + far)
        kind = 4
    offloaded = num_bytes > gso_size
    vnet = struct.pack(
        "<BBHHHH",
        *(1, kind if offloaded else 0, len(ip) + len(tcp), gso_size if offloaded else 0),
        *(len(ip), 16),
    )
    return vnet + bytes(ip) + bytes(tcp) + payload


@dataclass(frozen=True)
class Segment:
    sequence: int
    flags: int
    number: int
    payload: bytes


def segments_of(data: bytes) -> list[Segment]:
    """Cut a packet as the kernel would, after checking every length and checksum in it."""
    _, kind, header_bytes, gso_size, _, _ = struct.unpack_from("<BBHHHH", data)
    ip = data[VNET_BYTES:]
    if ip[0] >> 4 == 4:
        ip_bytes = (ip[0] & 15) * 4
        assert struct.unpack_from("!H", ip, 2)[0] == len(ip)
        assert checksum(ip[:ip_bytes]) == 0xFFFF
        number, addresses = struct.unpack_from("!H", ip, 4)[0], ip[12:20]
    else:
        ip_bytes, number, addresses = 40, 0, ip[8:40]
        assert struct.unpack_from("!H", ip, 4)[0] == len(ip) - 40
    tcp = ip[ip_bytes:]
    assert header_bytes == ip_bytes + (tcp[12] >> 4) * 4
    pseudo = addresses + struct.pack("!II", len(tcp), 6)
    assert struct.unpack_from("!H", tcp, 16)[0] in (checksum(pseudo), checksum(pseudo) ^ 0xFFFF)
    payload = ip[header_bytes:]
    size = gso_size if kind else max(1, len(payload))
    assert bool(kind) == (len(payload) > size)
    sequence, flags = struct.unpack_from("!I", tcp, 4)[0], tcp[13]
    starts = range(0, max(1, len(payload)), size)
    found = []
    for index, start in enumerate(starts):
        own = flags
        if start != starts[-1]:
            own &= ~(FIN | PSH)
        if index:
            own &= ~CWR
        position = (sequence + start) & 0xFFFFFFFF
        part = payload[start : start + size]
        found.append(Segment(position, own, (number + index) & 0xFFFF if number else 0, part))
    return found
