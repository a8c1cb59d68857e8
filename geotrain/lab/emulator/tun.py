"""TUN devices: a network interface whose packets this process reads and writes."""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

from geotrain.lab.emulator.segments import VNET_BYTES

TUN_PATH = Path("/dev/net/tun")
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM, _OFFLOAD_TCP_V4, _OFFLOAD_TCP_V6 = 0x01, 0x02, 0x04

MAX_PACKET_BYTES = VNET_BYTES + (64 << 10)


def open_tun(device: str) -> int:
    """A new device in the caller's network namespace; it lives as long as the descriptor.

    Packets come with a virtio_net_hdr, and TCP comes uncut: one read instead of forty.
    """
    descriptor = os.open(TUN_PATH, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETVNETHDRSZ, struct.pack("i", VNET_BYTES))
        offload = _OFFLOAD_CHECKSUM | _OFFLOAD_TCP_V4 | _OFFLOAD_TCP_V6
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, offload)
    except OSError:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    return descriptor
