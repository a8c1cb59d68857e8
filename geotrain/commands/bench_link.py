"""The options of `geotrain bench link`."""

import argparse
from collections.abc import Mapping
from typing import Any

from geotrain.lab.bench.link_options import LinkBench

_EMULATED: Mapping[str, Any] = {
    "rtt_ms": 100.0,
    "mbit": 1000.0,
    "loss": 0.0,
    "jitter_ms": 0.0,
    "congestion": "auto",
    "emulator": "auto",
}
"""What is asked of the lab, with its defaults; a real link is as it is."""


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        "link",
        help="what a link between two sites carries, and how soon",
        description="Measure a link, daemon to daemon: over the lab, or over the real one to a "
        "neighbour with --config and --peer, where both sites run this in place of their daemons.",
    )
    add = parser.add_argument
    add("--rtt-ms", type=float, help="round trip, emulated (default 100)")
    add("--mbit", type=float, help="rate, Mbit/s, emulated; 0 limits nothing (default 1000)")
    add("--loss", type=float, help="probability that a segment is lost (default 0)")
    add("--jitter-ms", type=float, help="deviation of the delay (default 0)")
    add(
        "--congestion",
        choices=("auto", "cubic", "bbr"),
        help="of the sites' kernels and of every lane (default auto: as the machine has it, "
        "and bbr for lanes that may)",
    )
    add(
        "--emulator",
        choices=("auto", "netns", "relay"),
        help="network namespaces, relays, or what this machine allows (default)",
    )
    add("--lanes", type=_lanes, default=None, metavar="auto|N", help="TCP connections for bulk")
    add("--message-mib", type=float, default=1.0, help="payload of a message (default 1)")
    add("--seconds", type=float, default=10.0, help="counted, after the warm-up (default 10)")
    add(
        "--tls",
        action=argparse.BooleanOptionalAction,
        help="encrypt the lab's link, with throw-away certificates (default)",
    )
    add("--both-ways", action="store_true", help="bulk in both directions at once")
    add("--config", metavar="FILE", help="this site's TOML file: measure its real link")
    add("--peer", metavar="NAME", help="the region at the other end of that link")
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser


def options_of(given: argparse.Namespace) -> LinkBench:
    """Raises ValueError with all that cannot be."""
    problems = _problems(given)
    if problems:
        raise ValueError("; ".join(problems))
    link = {name: _given(given, name) for name in _EMULATED}
    if not _is_emulated(link):
        link["emulator"] = "relay"  # of which none is made: both ends talk over the loopback
    return LinkBench(
        rtt_s=link["rtt_ms"] / 1e3,
        mbit=link["mbit"] or None,
        loss=link["loss"],
        jitter_s=link["jitter_ms"] / 1e3,
        congestion=None if link["congestion"] == "auto" else link["congestion"],
        emulator=link["emulator"],
        tls=given.tls is not False,
        lanes=given.lanes,
        # Slots begin at multiples of 64 bytes.
        message_bytes=max(1, round(given.message_mib * (1 << 20) / 64)) * 64,
        seconds=given.seconds,
        both_ways=given.both_ways,
        config=given.config,
        peer=given.peer,
        json=given.json,
    )


def _given(given: argparse.Namespace, name: str) -> Any:
    value = getattr(given, name)
    return _EMULATED[name] if value is None else value


def _is_emulated(link: Mapping[str, Any]) -> bool:
    return any(link[name] for name in ("rtt_ms", "mbit", "loss", "jitter_ms"))


def _lanes(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _problems(given: argparse.Namespace) -> list[str]:
    of_lab = [name for name in (*_EMULATED, "tls") if getattr(given, name) is not None]
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in of_lab)
    link = {name: _given(given, name) for name in _EMULATED}
    relay = link["emulator"] == "relay" or not _is_emulated(link)
    checks = {
        "--rtt-ms must be from 0 to 10000": 0 <= link["rtt_ms"] <= 10_000,
        "--mbit must be 0, or from 1 to 100000": link["mbit"] == 0 or 1 <= link["mbit"] <= 100_000,
        "--loss must be from 0 to 0.5": 0 <= link["loss"] <= 0.5,
        "--jitter-ms must be from 0 to 1000": 0 <= link["jitter_ms"] <= 1_000,
        "--message-mib must be from 0.01 to 256": 0.01 <= given.message_mib <= 256,
        "--seconds must be from 0.5 to 3600": 0.5 <= given.seconds <= 3_600,
        "--lanes must be auto, or from 1 to 64": given.lanes is None or 1 <= given.lanes <= 64,
        "--congestion needs --emulator netns: relays and the loopback cannot choose": not (
            relay and link["congestion"] != "auto"
        ),
        "--config and --peer go together": (given.config is None) == (given.peer is None),
        f"a real link is as it is: leave out {flags}": given.config is None or not of_lab,
    }
    return [message for message, holds in checks.items() if not holds]
