"""The forwarding process of one direction: reads one TUN device and writes the other, when due."""

import contextlib
import json
import mmap
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from geotrain.lab.emulator.packet_line import PacketLine
from geotrain.lab.emulator.tun import MAX_PACKET_BYTES
from geotrain.lab.settings import LinkSettings

COUNTERS = (
    *("num_packets", "num_segments", "wire_bytes"),
    *("num_lost", "num_dropped", "num_forgotten", "held_bytes"),
)
_LAYOUT = struct.Struct(f"={len(COUNTERS)}Q")
COUNTERS_BYTES = _LAYOUT.size
_MAX_READS = 64
"""Packets taken in one go, so that none which is due waits for a burst to end."""
_LATEST_S = 60.0


def read_counters(shared: mmap.mmap) -> dict[str, int]:
    return dict(zip(COUNTERS, _LAYOUT.unpack_from(shared), strict=True))


def run_timely() -> None:
    """Ask to be woken on time although the machine computes: the sites share its cores."""
    if sys.platform != "linux":
        return
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:  # not allowed here; the next best
        with contextlib.suppress(OSError):
            os.nice(-20)


def forward(
    line: PacketLine,
    *,
    source_fd: int,
    target_fd: int,
    control: socket.socket,
    keeper_fd: int,
    shared: mmap.mmap,
    on_orphaned: Callable[[], Any],
) -> None:
    """Forward until the keeper ends.

    Args:
        source_fd, target_fd: TUN devices, not blocking.
        control: Datagrams, each the whole settings as JSON; answered with one byte once in force.
        keeper_fd: A pidfd; when it is readable, there is no keeper any more.
        shared: Where the counters go.
        on_orphaned: Called then, before this returns.
    """
    now = time.monotonic
    inputs = [source_fd, control.fileno(), keeper_fd]
    while True:
        due = line.next_due()
        wait_s = _LATEST_S if due is None else max(0.0, min(due - now(), _LATEST_S))
        readable = select.select(inputs, (), (), wait_s)[0]
        for packet in line.pop_due(now=now()):
            with contextlib.suppress(OSError):  # a device that is down loses what is sent to it
                os.write(target_fd, packet)
        if source_fd in readable:
            _take(line, source_fd, now)
        if len(readable) > 1 or (readable and readable[0] != source_fd):
            told = control.fileno() in readable
            if keeper_fd in readable or (told and not _obey(line, control)):
                on_orphaned()
                return
        _LAYOUT.pack_into(shared, 0, *(getattr(line, name) for name in COUNTERS))


def _take(line: PacketLine, source_fd: int, now: Callable[[], float]) -> None:
    for _ in range(_MAX_READS):
        try:
            packet = os.read(source_fd, MAX_PACKET_BYTES)
        except OSError:  # nothing left, or the device is down
            return
        line.push(packet, now=now())


def _obey(line: PacketLine, control: socket.socket) -> bool:
    """Whether there still is someone to obey."""
    try:
        text = control.recv(1 << 16)
        if text:
            line.change(LinkSettings(**json.loads(text)))
            control.send(b"k")
    except ConnectionError:
        return False
    return bool(text)
