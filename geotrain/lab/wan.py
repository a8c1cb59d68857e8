"""A wide-area network on one machine.

    with open_wan("auto", sites=("virginia", "frankfurt"),
                  link=LinkSettings.from_round_trip(0.1, rate_bytes_per_s=125e6)) as wan:
        server = wan.popen("frankfurt", ["iperf3", "-s"])
        client = wan.popen("virginia", ["iperf3", "-c", wan.sites["frankfurt"].address])
        wan.set(rtt_s=0.3, loss=0.001)                          # every link, both directions
        wan.set(source="virginia", target="frankfurt", rate_bytes_per_s=6e6)     # one direction
        wan.cut(between=("virginia", "frankfurt")); wan.mend()

Two kinds behind one interface. "netns": every site is a network namespace with an address of its
own, so programs meet the kernel's TCP, with the congestion control asked for; Linux and root. And
"relay": every site is this machine's loopback, and programs dial the ports of `route`; everywhere.
A program that uses `command` or `popen`, `listen_host`, and `route` runs on both.

Calls block for milliseconds, opening for a few tenths of a second. Whatever ends this process
(SIGKILL too), its labs go with it, and everything that runs in their namespaces.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from geotrain.errors import ConfigError
from geotrain.lab.conversation import OPEN_LIMIT_S, Conversation, socket_name
from geotrain.lab.emulator.netns import enter_command, inside, obstacle
from geotrain.lab.emulator.sites import LabFailedError
from geotrain.lab.processes import isolated_module
from geotrain.lab.settings import (
    Direction,
    LinkSettings,
    Selection,
    Topology,
    check_sites,
    directions_of,
)

if TYPE_CHECKING:
    from geotrain.lab.selfcheck import Checked, NotMeasured

Kind = Literal["auto", "netns", "relay"]

BUFFER_BYTES = 64 << 20
"""What TCP may buffer in a site: enough for 1 Gbit/s over 300 ms. Machines come with less."""
_RELAY_LIMITS = (
    "the relay joins TCP connections: congestion control is not emulated, and a lost segment costs "
    "one round trip and nothing more"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place of the lab."""

    name: str
    address: str
    """Of the site; with relays all share the loopback, and `route` says what to dial."""
    namespace: str | None
    """A path that setns() and `nsenter --net=PATH` take; None with relays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where programs of one site dial to reach a port of another."""

    host: str
    port: int
    number: int


class Wan:
    """One lab, from `open_wan` or `find_wan`. May be used from any thread."""

    def __init__(self, conversation: Conversation, status: Mapping[str, Any]) -> None:
        self._conversation = conversation
        self.kind: Literal["netns", "relay"] = status["kind"]
        self.name: str = status["name"]
        self.topology: Topology = status["topology"]
        self.reason: str = status["reason"]
        """Why this kind and not the other, in one line."""
        self.congestion: str | None = status["congestion"]
        """The congestion control of every site; None with relays: it is the machine's."""
        self.keeper_pid: int = status["pid"]
        self.sites: Mapping[str, Site] = {
            name: Site(name=name, **place) for name, place in status["sites"].items()
        }

    @property
    def directions(self) -> list[Direction]:
        """(source, target) of every direction of every link."""
        return directions_of(list(self.sites), self.topology)

    def set(
        self,
        *,
        between: tuple[str, str] | None = None,
        source: str | None = None,
        target: str | None = None,
        why: str = "",
        **settings: Any,
    ) -> None:
        """Change fields of LinkSettings (or `rtt_s`); in force when this returns.

        Args:
            between: Both directions of the links between these two sites.
            source, target: The direction from here to there. Without any of the three: all.
            why: Kept with the change, for whoever shows it.
        """
        selection = selection_of(between=between, source=source, target=target)
        request = {"op": "set", "selection": asdict(selection), "settings": settings, "why": why}
        self._conversation.ask(request)

    def cut(
        self,
        *,
        between: tuple[str, str] | None = None,
        source: str | None = None,
        target: str | None = None,
    ) -> None:
        """Let nothing arrive any more, in one direction or both; no one is told."""
        self.set(between=between, source=source, target=target, cut=True, why="cut")

    def mend(
        self,
        *,
        between: tuple[str, str] | None = None,
        source: str | None = None,
        target: str | None = None,
    ) -> None:
        self.set(between=between, source=source, target=target, cut=False, why="mended")

    def start_script(self, text: str, *, file: str = "script") -> float:
        """Begin to apply timed changes (see lab/script.py); returns when the last one is due, s.

        It replaces a script that is running. ConfigError says what is wrong with it.
        """
        reply = self._conversation.ask({"op": "script", "text": text, "file": file})
        last_at_s: float = reply["last_at_s"]
        return last_at_s

    def command(self, site: str, command: Sequence[str]) -> list[str]:
        """The command that runs this command in the site; as it is where there are relays."""
        namespace = self._site(site).namespace
        return list(command) if namespace is None else enter_command(namespace, command)

    def popen(self, site: str, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a program in the site; it is ended with the lab. Options as of subprocess.Popen."""
        return subprocess.Popen(self.command(site, command), **options)

    def socket(self, site: str) -> socket.socket:
        """A new TCP socket that belongs to the site, for this process to use as its own."""
        namespace = self._site(site).namespace
        with contextlib.ExitStack() as stack:
            if namespace is not None:
                descriptor = os.open(namespace, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                stack.enter_context(inside(descriptor))
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def listen_host(self, site: str) -> str:
        """What a program in this site listens on."""
        return self._site(site).address

    def route(self, source: str, target: str, port: int) -> Route:
        """Where programs of `source` dial to reach `port` of `target`.

        With relays the port may be 0: then `aim` says it once it is known.
        """
        reply = self._conversation.ask(
            {"op": "route", "source": source, "target": target, "port": port}
        )
        return Route(**reply)

    def aim(self, route: Route, port: int) -> None:
        """The port of a route that was opened with 0; nothing to do between namespaces."""
        self._conversation.ask({"op": "aim", "number": route.number, "port": port})

    def close_route(self, route: Route) -> None:
        """Stop listening for it, and reset what is connected through it."""
        self._conversation.ask({"op": "close_route", "number": route.number})

    def status(self) -> dict[str, Any]:
        """Settings, counters and CPU seconds of every direction, and the last changes."""
        return self._conversation.ask({"op": "status"})

    def self_check(self) -> "list[Checked | NotMeasured]":
        """Measure round trip and rate of every direction; some seconds each. See selfcheck.py."""
        from geotrain.lab.selfcheck import self_check

        return self_check(self)

    def detach(self) -> None:
        """Let a lab with a name live on after this process."""
        if not self.name:
            raise ConfigError("only a lab with a name can be found again, so only it can detach")
        self._conversation.ask({"op": "detach"})

    def remove_at_end(self, folder: Path) -> None:
        """Let this folder go with the lab, whatever ends it."""
        self._conversation.ask({"op": "remove", "folder": str(folder.absolute())})

    def release(self) -> None:
        """Stop talking to a lab that was found, or has been detached, and leave it as it is."""
        self._conversation.hang_up()

    def close(self) -> None:
        """End the lab and everything that runs in its namespaces; returns when it is gone."""
        self._conversation.close(self.keeper_pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _site(self, name: str) -> Site:
        if name not in self.sites:
            raise ConfigError(f"there is no site {name}; there are {', '.join(self.sites)}")
        return self.sites[name]


def open_wan(
    kind: Kind = "auto",
    *,
    sites: Sequence[str],
    topology: Topology = "line",
    link: LinkSettings | None = None,
    links: Mapping[Direction, LinkSettings] | None = None,
    congestion: str | None = None,
    tcp_buffer_bytes: int | None = BUFFER_BYTES,
    name: str = "",
    seed: int = 0,
) -> Wan:
    """Make a lab.

    Args:
        kind: "auto" takes namespaces where they can be had, else relays; `Wan.reason` says why.
        topology: "line" joins neighbours (others are reached through them), "mesh" all pairs.
        link: Every direction; `links` says otherwise for single directions.
        congestion: "cubic", "bbr", ...; None takes the machine's. Relays cannot choose.
        tcp_buffer_bytes: The most that TCP may buffer a connection; None leaves the kernel's own.
        name: By which `find_wan` reaches it from other processes.
        seed: Of losses and jitter.

    Raises:
        ConfigError: What was asked for cannot be.
        LabFailedError: The machine does not let it be made.
    """
    spec = {
        "sites": list(sites),
        "topology": topology,
        "links": _links(sites, topology, link or LinkSettings(), links or {}),
        "congestion": congestion,
        "tcp_buffer_bytes": tcp_buffer_bytes,
        "name": name,
        "seed": seed,
    }
    why_not = obstacle() if kind != "relay" else None
    if kind == "netns" and why_not is not None:
        raise LabFailedError(f"no network namespaces here: {why_not}; --emulator relay needs none")
    if kind != "relay" and why_not is None:
        try:
            return _open(spec | {"kind": "netns", "reason": "network namespaces can be had"})
        except LabFailedError as error:
            if kind == "netns":
                raise
            why_not = str(error)
    asked = f"not namespaces, since {why_not}" if why_not else "relays were asked for"
    return _open(spec | {"kind": "relay", "reason": f"{asked}; {_RELAY_LIMITS}"})


def _links(
    sites: Sequence[str],
    topology: Topology,
    link: LinkSettings,
    own: Mapping[Direction, LinkSettings],
) -> list[list[Any]]:
    check_sites(sites)
    ways = directions_of(sites, topology)
    for source, target in own:
        Selection(source=source, target=target).pick(ways)
    return [[*way, own.get(way, link).as_dict()] for way in ways]


def find_wan(name: str) -> Wan:
    """A lab of this user that another process made. ConfigError where there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(socket_name(name))
    except OSError as error:
        sock.close()
        raise ConfigError(f"no lab called {name} is running") from error
    conversation = Conversation(sock, keeper=None)
    return Wan(conversation, conversation.ask({"op": "status"}))


def names_of_labs() -> list[str]:
    """The labs of this user that can be found."""
    prefix = "@" + socket_name("")[1:]
    with contextlib.suppress(FileNotFoundError):
        found = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
        return sorted({text.removeprefix(prefix) for text in found if text.startswith(prefix)})
    return []


def selection_of(
    *, between: tuple[str, str] | None, source: str | None, target: str | None
) -> Selection:
    if between is None:
        return Selection(source=source, target=target)
    if source is not None or target is not None:
        raise ConfigError("give between, or source and target, not both")
    return Selection(source=between[0], target=between[1], both=True)


def _open(spec: Mapping[str, Any]) -> Wan:
    near, far = socket.socketpair()
    # Elsewhere than on Linux only the closing of the socket tells that we have ended.
    own = os.pidfd_open(os.getpid()) if sys.platform == "linux" else os.dup(far.fileno())
    try:
        keeper = subprocess.Popen(
            isolated_module("geotrain.lab.keeper", [str(far.fileno()), str(own)]),
            pass_fds=(far.fileno(), own),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Not the caller's: what is typed at its terminal is for the caller to answer.
            start_new_session=True,
            cwd="/",
        )
    finally:
        far.close()
        os.close(own)
    conversation = Conversation(near, keeper)
    try:
        near.sendall(json.dumps(spec).encode() + b"\n")
        return Wan(conversation, conversation.answer(timeout_s=OPEN_LIMIT_S))
    except BaseException:
        conversation.abandon()
        raise
