"""The sites of a lab in network namespaces: devices, addresses, routes, and the forwarders."""

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from geotrain.errors import GeotrainError
from geotrain.lab.emulator.forward import COUNTERS_BYTES, forward, read_counters, run_timely
from geotrain.lab.emulator.netns import congestion_of, inode_of, inside, make_namespaces, purge
from geotrain.lab.emulator.packet_line import PacketLine
from geotrain.lab.emulator.tun import open_tun
from geotrain.lab.settings import Direction, LinkSettings, Topology, path_between

_SYSCTL = Path("/proc/sys/net")
_MTU, _QUEUE_PACKETS = 1500, 10_000
_IP_LIMIT_S = 20.0
_OBEY_LIMIT_S = 5.0
_END_LIMIT_S = 2.0


class LabFailedError(GeotrainError):
    """The lab cannot be set up, or a part of it has ended; says which."""


def address_of(index: int) -> str:
    return f"10.77.0.{index + 1}"


@dataclass(slots=True, kw_only=True, eq=False)
class Forwarder:
    """The process of one direction."""

    direction: Direction
    pid: int
    pidfd: int
    control: socket.socket
    shared: mmap.mmap

    def change(self, settings: LinkSettings) -> None:
        """Returns once they are in force."""
        try:
            self.control.send(json.dumps(settings.as_dict()).encode())
            self.control.recv(1)
        except OSError as error:
            way = " to ".join(self.direction)
            raise LabFailedError(f"the forwarder {way} does not answer ({error})") from error

    def counters(self) -> dict[str, Any]:
        return read_counters(self.shared) | {"cpu_s": _cpu_s(self.pid), "pid": self.pid}


class NamespaceSites:
    """Namespaces joined by TUN devices. Made by a process without other threads."""

    def __init__(
        self,
        sites: Sequence[str],
        topology: Topology,
        links: Mapping[Direction, LinkSettings],
        *,
        congestion: str | None,
        tcp_buffer_bytes: int | None,
        seed: int,
    ) -> None:
        self._sites = list(sites)
        self._topology = topology
        self._keeper_fd = os.pidfd_open(os.getpid())
        self.forwarders: list[Forwarder] = []
        self.namespaces = make_namespaces(len(sites), congestion)
        self.inodes = {inode_of(namespace) for namespace in self.namespaces}
        self.congestion = congestion_of(self.namespaces[0])
        devices: dict[Direction, int] = {}
        for index, namespace in enumerate(self.namespaces):
            with inside(namespace):
                devices |= self._equip(index, list(links), tcp_buffer_bytes)
        for number, (direction, settings) in enumerate(links.items()):
            rng = Random(f"{seed}/{number}")
            fds = devices[direction], devices[direction[::-1]]
            self.forwarders.append(self._start(direction, settings, fds, rng))
        for device in devices.values():
            os.close(device)  # so that a forwarder's end is seen as a device that is gone

    def close(self) -> None:
        """End what runs in the namespaces, then the forwarders; the rest ends with this process."""
        for namespace in self.namespaces:
            os.close(namespace)
        self.namespaces = []
        purge(self.inodes)
        for forwarder in self.forwarders:
            forwarder.control.close()
        for forwarder in self.forwarders:
            if not select.select([forwarder.pidfd], (), (), _END_LIMIT_S)[0]:
                os.kill(forwarder.pid, signal.SIGKILL)  # ours, and not waited for yet
            os.waitpid(forwarder.pid, 0)

    def _equip(
        self, index: int, directions: Sequence[Direction], tcp_buffer_bytes: int | None
    ) -> dict[Direction, int]:
        """Devices, addresses and routes of the site whose namespace this thread is in."""
        name, own = self._sites[index], address_of(index)
        devices = {}
        batch = ["link set lo up", f"addr add {own}/32 dev lo"]
        for source, target in directions:
            if source == name:
                device = f"wan{self._sites.index(target)}"
                devices[source, target] = open_tun(device)
                batch += [f"link set {device} up mtu {_MTU} txqueuelen {_QUEUE_PACKETS}"]
        _set_sysctls(tcp_buffer_bytes, forwards=len(devices) > 1)
        for other, site in enumerate(self._sites):
            if other != index:
                hop = path_between(name, site, self._sites, self._topology)[0][1]
                device = f"wan{self._sites.index(hop)}"
                batch += [f"route add {address_of(other)}/32 dev {device} src {own}"]
        try:
            subprocess.run(
                ["ip", "-batch", "-"],
                input="\n".join(batch) + "\n",
                check=True,
                capture_output=True,
                text=True,
                timeout=_IP_LIMIT_S,
            )
        except subprocess.SubprocessError as error:
            detail = getattr(error, "stderr", None) or str(error)
            raise LabFailedError(f"ip could not set up {name}: {detail.strip()}") from error
        return devices

    def _start(
        self, direction: Direction, settings: LinkSettings, fds: tuple[int, int], rng: Random
    ) -> Forwarder:
        shared = mmap.mmap(-1, COUNTERS_BYTES)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.settimeout(_OBEY_LIMIT_S)
        pid = os.fork()
        if pid == 0:
            self._be_forwarder(PacketLine(settings, rng), fds, far, shared)
        far.close()
        return Forwarder(
            direction=direction, pid=pid, pidfd=os.pidfd_open(pid), control=near, shared=shared
        )

    def _be_forwarder(
        self, line: PacketLine, fds: tuple[int, int], control: socket.socket, shared: mmap.mmap
    ) -> NoReturn:
        """In the new process: never returns into the keeper's code."""
        status = 1
        try:
            # What the keeper and the other forwarders hold is not ours to keep alive.
            _close_all_but({*fds, control.fileno(), self._keeper_fd})
            run_timely()
            forward(
                line,
                source_fd=fds[0],
                target_fd=fds[1],
                control=control,
                keeper_fd=self._keeper_fd,
                shared=shared,
                on_orphaned=lambda: purge(self.inodes),
            )
            status = 0
        finally:
            os._exit(status)


def _set_sysctls(tcp_buffer_bytes: int | None, *, forwards: bool) -> None:
    values = {
        # What an earlier connection learned of the path must not decide how the next one starts.
        "ipv4/tcp_no_metrics_save": "1",
        "ipv4/ip_forward": "1" if forwards else "0",
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv6/conf/default/disable_ipv6": "1",
    }
    if tcp_buffer_bytes is not None:
        values["ipv4/tcp_rmem"] = f"4096 131072 {tcp_buffer_bytes}"
        values["ipv4/tcp_wmem"] = f"4096 65536 {tcp_buffer_bytes}"
    for name, value in values.items():
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            (_SYSCTL / name).write_text(value)


def _close_all_but(kept: set[int]) -> None:
    keep = sorted({0, 1, 2} | kept)
    for low, high in zip(keep, [*keep[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)


def _cpu_s(pid: int) -> float:
    """User and system time of a process; 0 once it is gone."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
