"""`geotrain lab`: an emulated wide-area network for any program, by name."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from geotrain.errors import ConfigError
from geotrain.lab.script import read_script
from geotrain.lab.selfcheck import self_check
from geotrain.lab.settings import USER_KEYS, LinkSettings, describe_settings, in_base_units
from geotrain.lab.wan import BUFFER_BYTES, Wan, find_wan, names_of_labs, open_wan, selection_of

_HELP = {
    "rtt_ms": "round trip: half of it each way",
    "delay_ms": "one way",
    "mbit": "rate as a bulk TCP flow sees it, Mbit/s; 0: not limited",
    "jitter_ms": "deviation of the delay; order is kept",
    "loss": "probability that a segment is lost, such as 0.001",
    "queue_ms": "what would wait longer at the link is dropped",
    "queue_kib": "the same as a size",
    "idle_drop_s": "a connection silent for longer is forgotten without a word; 0: never",
}


def main(argv: Sequence[str]) -> int:
    """Run one verb. Returns the exit status; `exec` does not return."""
    arguments, command = list(argv), []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    options = _parser().parse_args(arguments)
    if options.verb == "exec":
        return _exec(options, command)
    if command:
        raise ConfigError("only `geotrain lab exec NAME SITE -- CMD ...` takes a command")
    verbs = {"up": _up, "set": _set, "status": _status, "down": _down}
    return verbs[options.verb](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="geotrain lab",
        description="Sites on this machine, joined by emulated long-distance links.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.add_argument("name", metavar="NAME", nargs="?" if name == "status" else None)
        return added

    up = verb("up", "Make a lab; it stays until it is told to go down.")
    _add_up(up)
    change = verb("set", "Change links while they run: all, or those named.")
    _add_set(change)
    for part in (up, change):
        for key, text in _HELP.items():
            part.add_argument(f"--{key.replace('_', '-')}", type=float, metavar="N", help=text)
        part.add_argument("--script", type=Path, metavar="FILE", help="timed changes, as TOML")
    status = verb("status", "Show a lab; without a name, those that run.")
    status.add_argument("--json", action="store_true", help="everything, as JSON")
    status.add_argument("--check", action="store_true", help="measure what the links really do")
    inside = verb("exec", "Run a program in a site: geotrain lab exec NAME SITE -- CMD ...")
    inside.add_argument("site", metavar="SITE")
    verb("down", "End a lab and everything that runs in it.")
    return parser


def _add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument("--sites", default="a,b", help="their names, with commas (default a,b)")
    up.add_argument("--topology", choices=("line", "mesh"), default="line")
    up.add_argument("--emulator", choices=("auto", "netns", "relay"), default="auto")
    up.add_argument("--congestion", help="cubic, bbr, ... in every site; default: the machine's")
    up.add_argument(
        "--kernel-buffers", action="store_true", help="leave TCP's buffers as the kernel has them"
    )
    up.add_argument("--seed", type=int, default=0, help="of losses and jitter")
    up.add_argument(
        "--route",
        action="append",
        default=[],
        metavar="FROM:TO:PORT",
        help="say where programs of FROM dial to reach PORT of TO (relays need it); repeatable",
    )


def _add_set(change: argparse.ArgumentParser) -> None:
    change.add_argument("--between", nargs=2, metavar=("A", "B"), help="both directions")
    change.add_argument("--from", dest="source", metavar="A", help="the direction that leaves A")
    change.add_argument("--to", dest="target", metavar="B", help="the direction that reaches B")
    cutting = change.add_mutually_exclusive_group()
    cutting.add_argument("--cut", action="store_true", default=None, help="nothing passes")
    cutting.add_argument("--mend", dest="cut", action="store_false", help="undo --cut")


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The link settings on the command line, as fields of LinkSettings."""
    values = {key: getattr(options, key, None) for key in USER_KEYS}
    return in_base_units({key: value for key, value in values.items() if value is not None})


def _up(options: argparse.Namespace) -> int:
    routes = [_route(text) for text in options.route]
    wan = open_wan(
        options.emulator,
        sites=options.sites.split(","),
        topology=options.topology,
        link=LinkSettings().changed(_given(options)),
        congestion=options.congestion,
        tcp_buffer_bytes=None if options.kernel_buffers else BUFFER_BYTES,
        name=options.name,
        seed=options.seed,
    )
    with wan:  # so that what fails below, or ends this process, ends the lab as well
        print(f"lab {wan.name}: {wan.kind} ({wan.reason})")
        for site in wan.sites.values():
            print(f"  {site.name}: {site.address}")
        for source, target, port in routes:
            route = wan.route(source, target, port)
            print(f"  {source} reaches port {port} of {target} at {route.host}:{route.port}")
        if options.script is not None:
            _start_script(wan, options.script)
        wan.detach()
        wan.release()
    return 0


def _route(text: str) -> tuple[str, str, int]:
    source, _, rest = text.partition(":")
    target, _, port = rest.partition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--route must be FROM:TO:PORT, as in a:b:29500 (got {text})")
    return source, target, int(port)


def _set(options: argparse.Namespace) -> int:
    settings = _given(options)
    if not settings and options.script is None:
        raise ConfigError("nothing to set; see geotrain lab set --help")
    with _found(options.name) as wan:
        if settings:
            where = {
                "between": tuple(options.between) if options.between else None,
                "source": options.source,
                "target": options.target,
            }
            wan.set(**where, why="geotrain lab set", **settings)
            changed = selection_of(**where).pick(wan.directions)
            for link in wan.status()["links"]:
                if (link["source"], link["target"]) in changed:
                    print(_link_line(link))
        if options.script is not None:
            _start_script(wan, options.script)
    return 0


@contextlib.contextmanager
def _found(name: str) -> Iterator[Wan]:
    wan = find_wan(name)
    try:
        yield wan
    finally:
        wan.release()


def _start_script(wan: Wan, path: Path) -> None:
    last_at_s = wan.start_script(read_script(path), file=str(path))
    print(f"script {path}: the last change is in {last_at_s:g} s")


def _status(options: argparse.Namespace) -> int:
    if options.name is None:
        names = names_of_labs()
        print(json.dumps(names) if options.json else "\n".join(names) or "no lab is running")
        return 0
    with _found(options.name) as wan:
        status = wan.status()
        checks = self_check(wan, say=_say_on_stderr) if options.check else []
    if options.json:
        measured = [{"link": str(check), "holds": check.holds} for check in checks]
        print(json.dumps(status | ({"check": measured} if checks else {})))
    else:
        print("\n".join([*_lines(status), *map(str, checks)]))
    return 0 if all(check.holds for check in checks) else 1


def _lines(status: Mapping[str, Any]) -> list[str]:
    congestion = f", congestion control {status['congestion']}" if status["congestion"] else ""
    lines = [f"lab {status['name']}: {status['kind']}{congestion} ({status['reason']})"]
    lines += [f"  {name}: {site['address']}" for name, site in status["sites"].items()]
    for link in status["links"]:
        lines.append(f"  {_link_line(link)}")
        counters = (
            f"{name} {value}" for name, value in link["counters"].items() if value and name != "pid"
        )
        lines.append(f"    {', '.join(counters) or 'nothing has passed'}")
    for event in status["events"]:
        settings = describe_settings(event["settings"])
        lines.append(f"  changed: {event['links']}: {settings} ({event['why']})")
    return lines


def _link_line(link: Mapping[str, Any]) -> str:
    return f"{link['source']} to {link['target']}: {LinkSettings(**link['settings'])}"


def _say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _exec(options: argparse.Namespace, command: Sequence[str]) -> int:
    if not command:
        raise ConfigError("no command: geotrain lab exec NAME SITE -- CMD ...")
    with _found(options.name) as wan:
        argv = wan.command(options.site, command)
    environment = {**os.environ, "GEOTRAIN_LAB_SITE": options.site}
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        print(f"geotrain lab: cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _down(options: argparse.Namespace) -> int:
    find_wan(options.name).close()
    return 0
