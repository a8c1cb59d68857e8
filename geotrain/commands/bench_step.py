"""The options of `geotrain bench step`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from geotrain.control.journal import Journal
from geotrain.errors import ConfigError
from geotrain.lab.bench.options import BenchOptions, Script, Work
from geotrain.lab.bench.phases import phases_of
from geotrain.lab.script import read_script

_MAX_REGIONS = 16
_FORWARD_SHARE = 1 / 3
"""Of what a sample, or a microbatch's overhead, takes there and back."""
_OF_A_MICROBATCH: Mapping[str, Any] = {
    "forward_ms": [20.0],
    "backward_ms": [40.0],
    "boundary_kib": 1024.0,
}
_OF_A_SAMPLE: Mapping[str, Any] = {
    "sample_ms": 13.0,
    "overhead_ms": [8.0],
    "boundary_kib_per_sample": 256.0,
}
"""Two ways to say what the work is, with their defaults."""


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    step = verbs.add_parser(
        "step",
        help="how long an optimizer step takes over long-distance links",
        description="Time steps of a pipeline over emulated long-distance links: real daemons, "
        "training processes and tensors, and stages that sleep instead of computing.",
    )
    _add_work_options(step)
    _add_run_options(step)
    _add_link_options(step)
    return step


def options_of(given: argparse.Namespace) -> BenchOptions:
    """Raises ValueError with all that cannot be."""
    problems = _mixed(given)
    for name, value in {**_OF_A_MICROBATCH, **_OF_A_SAMPLE}.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    problems += _out_of_range(given)
    if problems:
        raise ValueError("; ".join(problems))
    options = BenchOptions(
        work=_work(given),
        rtt_s=given.rtt_ms / 1e3,
        mbit=given.mbit,
        loss=given.loss,
        jitter_s=given.jitter_ms / 1e3,
        window=given.window,
        memory_samples=given.memory_samples,
        script=_script(given.script),
        replay=_replay(given.replay),
        congestion=given.congestion,
        limit_s=given.limit_s,
        emulator=given.emulator,
        against_torch=given.against == "torch",
        json=given.json,
    )
    if options.script is not None:
        try:
            phases_of(options)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    return options


def _work(given: argparse.Namespace) -> Work:
    regions = given.regions
    if given.global_batch is None:
        return Work(
            forward_s=[ms / 1e3 for ms in _spread(given.forward_ms, regions)],
            backward_s=[ms / 1e3 for ms in _spread(given.backward_ms, regions)],
            boundary_bytes=round(given.boundary_kib * 1024),
            num_microbatches=given.microbatches,
            steps=given.steps,
        )
    overhead_s = [ms / 1e3 for ms in _spread(given.overhead_ms, regions)]
    sample_s = given.sample_ms / 1e3
    return Work(
        forward_s=[each * _FORWARD_SHARE for each in overhead_s],
        backward_s=[each * (1 - _FORWARD_SHARE) for each in overhead_s],
        forward_sample_s=sample_s * _FORWARD_SHARE,
        backward_sample_s=sample_s * (1 - _FORWARD_SHARE),
        boundary_bytes=round(given.boundary_kib_per_sample * 1024),
        num_microbatches=given.microbatches,
        num_samples=given.global_batch,
        steps=given.steps,
    )


def _replay(path: Path | None) -> Path | None:
    if path is not None:
        try:
            Journal.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot repeat the plans of {path}: {error}") from error
    return path


def _script(path: Path | None) -> Script | None:
    if path is None:
        return None
    try:
        return Script(text=read_script(path), file=str(path))
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _add_work_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--regions", type=int, default=2, help="stages in a line, each a region (default 2)")
    add(
        "--microbatches",
        type=_count,
        default=32,
        metavar="auto|N",
        help="parts of each step's batch (default 32); auto: as many as follow from what they "
        "cost, with --window auto and --global-batch",
    )
    for name, text in (("forward", "of a microbatch"), ("backward", "of its backward")):
        default = _OF_A_MICROBATCH[f"{name}_ms"][0]
        add(
            f"--{name}-ms",
            type=_numbers,
            metavar="MS[,MS..]",
            help=f"time {text}, one for all stages or one for each (default {default:g})",
        )
    add("--boundary-kib", type=float, help="a microbatch's tensor (default 1024)")
    add(
        "--global-batch",
        type=int,
        metavar="N",
        help="samples in a step, where what a microbatch costs is to depend on its samples: "
        "then --overhead-ms, --sample-ms and --boundary-kib-per-sample say what it is",
    )
    add(
        "--overhead-ms",
        type=_numbers,
        metavar="MS[,MS..]",
        help="forward and backward of a microbatch, however few its samples; one for all stages "
        "or one for each; a third is the forward (default 8)",
    )
    add("--sample-ms", type=float, help="what each sample adds to that (default 13)")
    add("--boundary-kib-per-sample", type=float, help="a sample's tensor (default 256)")
    add(
        "--memory-samples",
        type=int,
        metavar="N",
        help="the samples that each region has room for in flight (default: any number)",
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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
        "--script",
        type=Path,
        metavar="FILE",
        help="timed changes of the links, as of `geotrain lab`, from the end of the first step on",
    )
    add(
        "--replay",
        type=Path,
        metavar="FILE",
        help="run each step under the plan that this file has for it, as site.plan_log writes it",
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


def _count(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _mixed(given: argparse.Namespace) -> list[str]:
    """Options that make no sense together."""
    by_sample = given.global_batch is not None
    other = _OF_A_MICROBATCH if by_sample else [*_OF_A_SAMPLE, "memory_samples"]
    stray = ", ".join(_flag(name) for name in other if getattr(given, name) is not None)
    auto = given.microbatches == "auto"
    relay = given.emulator == "relay"
    checks = {
        f"{stray} needs --global-batch, the samples in a step": by_sample or not stray,
        f"{stray} is of a microbatch; with --global-batch give --overhead-ms, --sample-ms and "
        "--boundary-kib-per-sample": not (by_sample and stray),
        "--microbatches auto needs --global-batch, the samples to cut": by_sample or not auto,
        "--microbatches auto needs --window auto": given.window == "auto" or not auto,
        "--against torch compares microbatches of one size; leave out --global-batch": not (
            given.against and by_sample
        ),
        "--replay says what the windows are; leave out --window": given.window == "classic"
        or not given.replay,
        "--against torch needs links that stay as they are; leave out --script": not (
            given.against and given.script
        ),
        "--against torch needs sites with addresses of their own, which relays cannot give": not (
            relay and given.against
        ),
        "--congestion needs --emulator netns: relays cannot choose": not (
            relay and given.congestion
        ),
    }
    return [message for message, holds in checks.items() if not holds]


def _out_of_range(given: argparse.Namespace) -> list[str]:
    regions, batch = given.regions, given.global_batch
    count = 1 if given.microbatches == "auto" else given.microbatches
    named = isinstance(given.window, str)
    checks = {
        f"--regions must be from 2 to {_MAX_REGIONS}": 2 <= regions <= _MAX_REGIONS,
        "--microbatches must be from 1 to 1024": 1 <= count <= 1024,
        "--global-batch must be from 1 to 4096": batch is None or 1 <= batch <= 4096,
        "--microbatches cannot exceed --global-batch": batch is None or count <= batch,
        "--memory-samples must be 1 or more": (given.memory_samples or 1) >= 1
        and given.memory_samples != 0,
        "--rtt-ms must be from 0 to 10000": 0 <= given.rtt_ms <= 10_000,
        "--mbit must be from 1 to 100000": 1 <= given.mbit <= 100_000,
        "--loss must be from 0 to 0.5": 0 <= given.loss <= 0.5,
        "--jitter-ms must be from 0 to 1000": 0 <= given.jitter_ms <= 1_000,
        "--steps must be from 2 to 1000": 2 <= given.steps <= 1000,
        "--limit-s must be from 1 to 86400": given.limit_s is None or 1 <= given.limit_s <= 86_400,
        "--window numbers must be from 1 to 1024": named
        or all(1 <= n <= 1024 for n in given.window),
        f"--window needs one number for each of the {regions} regions": named
        or len(given.window) == regions,
        "--sample-ms must be from 0 to 60000": 0 <= given.sample_ms <= 60_000,
    }
    for name in ("boundary_kib", "boundary_kib_per_sample"):
        checks[f"{_flag(name)} must be from 1 to 65536"] = 1 <= getattr(given, name) <= 65536
    for name in ("forward_ms", "backward_ms", "overhead_ms"):
        values = getattr(given, name)
        checks[f"{_flag(name)} must be from 0 to 60000"] = all(0 <= ms <= 60_000 for ms in values)
        one_each = len(values) in (1, regions)
        checks[f"{_flag(name)} needs one number, or one for each region"] = one_each
    return [message for message, holds in checks.items() if not holds]
