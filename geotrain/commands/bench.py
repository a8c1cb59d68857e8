"""`geotrain bench`: measurements on this machine."""

import argparse
from collections.abc import Sequence
from typing import Literal

from geotrain.commands import bench_link
from geotrain.lab.bench.link_options import LinkBench
from geotrain.lab.bench.options import BenchOptions, Work

_MAX_REGIONS = 16


def main(argv: Sequence[str]) -> int:
    """Run one measurement. Returns the exit status."""
    options = parse(argv)
    if isinstance(options, LinkBench):
        from geotrain.lab.bench import link

        return link.main(options)
    from geotrain.lab.bench import step

    return step.main(options)


def parse(argv: Sequence[str]) -> BenchOptions | LinkBench:
    """The options; argparse's own message and exit status 2 for what cannot be."""
    parser = argparse.ArgumentParser(prog="geotrain bench", description="Measure on this machine.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="WHAT")
    step = verbs.add_parser(
        "step",
        help="how long an optimizer step takes over long-distance links",
        description="Time steps of a pipeline over emulated long-distance links: real daemons, "
        "training processes and tensors, and stages that sleep instead of computing.",
    )
    _add_step_options(step)
    _add_link_options(step)
    link = bench_link.add_to(verbs)
    given = parser.parse_args(argv)
    if given.verb == "link":
        try:
            return bench_link.options_of(given)
        except ValueError as error:
            link.error(str(error))
    problems = _problems(given)
    if problems:
        step.error("; ".join(problems))
    regions = given.regions
    return BenchOptions(
        work=Work(
            forward_s=[ms / 1e3 for ms in _spread(given.forward_ms, regions)],
            backward_s=[ms / 1e3 for ms in _spread(given.backward_ms, regions)],
            boundary_bytes=round(given.boundary_kib * 1024),
            num_microbatches=given.microbatches,
            steps=given.steps,
        ),
        rtt_s=given.rtt_ms / 1e3,
        mbit=given.mbit,
        loss=given.loss,
        jitter_s=given.jitter_ms / 1e3,
        window=given.window,
        congestion=given.congestion,
        limit_s=given.limit_s,
        emulator=given.emulator,
        against_torch=given.against == "torch",
        json=given.json,
    )


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--regions", type=int, default=2, help="stages in a line, each a region (default 2)")
    add("--microbatches", type=int, default=32, help="parts of each step's batch (default 32)")
    for name, ms, text in (
        ("forward", 20.0, "of a microbatch"),
        ("backward", 40.0, "of its backward"),
    ):
        add(
            f"--{name}-ms",
            type=_numbers,
            default=[ms],
            metavar="MS[,MS..]",
            help=f"time {text}, one for all stages or one for each (default {ms:g})",
        )
    add("--boundary-kib", type=float, default=1024.0, help="a microbatch's tensor (default 1024)")
    add("--steps", type=int, default=5, help="the first is not counted (default 5)")
    add(
        "--window",
        type=_window,
        default="classic",
        metavar="classic|hide|auto|N,N,..",
        help="microbatches in flight in each region: as 1F1B has (classic, the default), as many "
        "as hide the links' delay by the figures given here, as many as follow the links, or these",
    )
    add(
        "--limit-s",
        type=float,
        help="how long each way of running the steps may take (default: by what is asked for)",
    )
    add(
        "--against",
        choices=("torch",),
        help="the same work on torch.distributed.pipelining over gloo, on the same links",
    )
    add("--json", action="store_true", help="one JSON object on stdout")


def _add_link_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rtt-ms", type=float, default=100.0, help="round trip of each link (default 100)")
    add("--mbit", type=float, default=1000.0, help="rate of each link, Mbit/s (default 1000)")
    add("--loss", type=float, default=0.0, help="probability that a segment is lost (default 0)")
    add("--jitter-ms", type=float, default=0.0, help="deviation of the delay (default 0)")
    add(
        "--congestion",
        choices=("cubic", "bbr"),
        help="of the sites' kernels and of geotrain's own connections (default: as the kernels "
        "have it, and geotrain asks for bbr where it may)",
    )
    add(
        "--emulator",
        choices=("auto", "netns", "relay"),
        default="auto",
        help="network namespaces, relays, or what this machine allows (default)",
    )


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _window(text: str) -> Literal["auto", "classic", "hide"] | tuple[int, ...]:
    if text == "auto":
        return "auto"
    if text == "classic":
        return "classic"
    if text == "hide":
        return "hide"
    return tuple(int(part) for part in text.split(","))


def _spread(values: Sequence[float], count: int) -> list[float]:
    return list(values) * count if len(values) == 1 else list(values)


def _problems(given: argparse.Namespace) -> list[str]:
    regions = given.regions
    named = isinstance(given.window, str)
    whole = named or all(1 <= n <= 1024 for n in given.window)
    one_each = named or len(given.window) == regions
    checks = {
        f"--regions must be from 2 to {_MAX_REGIONS}": 2 <= regions <= _MAX_REGIONS,
        "--microbatches must be from 1 to 1024": 1 <= given.microbatches <= 1024,
        "--boundary-kib must be from 1 to 65536": 1 <= given.boundary_kib <= 65536,
        "--rtt-ms must be from 0 to 10000": 0 <= given.rtt_ms <= 10_000,
        "--mbit must be from 1 to 100000": 1 <= given.mbit <= 100_000,
        "--loss must be from 0 to 0.5": 0 <= given.loss <= 0.5,
        "--jitter-ms must be from 0 to 1000": 0 <= given.jitter_ms <= 1_000,
        "--steps must be from 2 to 1000": 2 <= given.steps <= 1000,
        "--limit-s must be from 1 to 86400": given.limit_s is None or 1 <= given.limit_s <= 86_400,
        "--window numbers must be from 1 to 1024": whole,
        f"--window needs one number for each of the {regions} regions": one_each,
    }
    for name in ("forward_ms", "backward_ms"):
        values, flag = getattr(given, name), f"--{name.replace('_', '-')}"
        checks[f"{flag} must be from 0 to 60000"] = all(0 <= ms <= 60_000 for ms in values)
        checks[f"{flag} needs one number, or one for each region"] = len(values) in (1, regions)
    relay = given.emulator == "relay"
    checks |= {
        "--against torch needs sites with addresses of their own, which relays cannot give": not (
            relay and given.against
        ),
        "--congestion needs --emulator netns: relays cannot choose": not (
            relay and given.congestion
        ),
    }
    return [message for message, holds in checks.items() if not holds]
