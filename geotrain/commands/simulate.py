"""`geotrain simulate`: what a step of this run would take over given links, drawn as a timeline."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from geotrain.config import Config
from geotrain.control.costs import DirectionCosts, LinkCosts, StageCosts
from geotrain.control.ideal import Costs, ideal_step_s, lower_bound_s
from geotrain.control.planner import Limits, choose_plan
from geotrain.errors import ConfigError
from geotrain.pipeline.idle import CAUSES, idle_s
from geotrain.pipeline.simulate import (
    Boundary,
    Direction,
    PipelineModel,
    Simulated,
    StageTimes,
    simulate,
)
from geotrain.pipeline.timed import chrome_events
from geotrain.pipeline.timeline import ASCII, Glyphs, draw
from geotrain.pipeline.window import resolve_windows, windows_for_latency

_WIDTH = 80
_MAX_MICROBATCHES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be simulated."""

    names: Sequence[str]
    costs: Costs
    windows: Sequence[int]
    link: str
    """The links in words."""
    activation_mib: Sequence[float] = ()
    """What a microbatch in flight keeps, one a region; none where it was not said."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the config file does not say of a step."""
    add = parser.add_argument
    for flag, default, text in (
        ("--rtt-ms", "100", "round trip of each link"),
        ("--mbit", "1000", "rate of each link, Mbit/s"),
        ("--forward-ms", "20", "time of a microbatch's forward in each region"),
        ("--backward-ms", "40", "time of its backward in each region"),
        ("--boundary-kib", "1024", "a microbatch's tensor on each link"),
    ):
        help = f"{text}; one number or one for each (default {default})"
        add(flag, default=default, metavar="N[,N..]", help=help)
    help = "what a microbatch in flight keeps in memory in each region; adds them up"
    add("--activation-mib", metavar="N[,N..]", help=help)
    add("--microbatches", type=int, metavar="N", help="default: run.plan.microbatches")
    add("--window", metavar="W", help="auto, classic, hide, or numbers (default: run.plan.window)")
    add("--trace", metavar="FILE", help="write the step for ui.perfetto.dev or chrome://tracing")


def run(config: Config, options: argparse.Namespace) -> int:
    """Simulate and print. ConfigError for numbers that cannot be."""
    question = ask(config, options)
    step = simulate(
        model_of(question.costs),
        num_microbatches=question.costs.num_microbatches,
        windows=question.windows,
    )
    try:
        Glyphs().legend.encode(sys.stdout.encoding or "ascii")
        glyphs = Glyphs()
    except UnicodeEncodeError:
        glyphs = ASCII
    for line in report(question, step, glyphs):
        print(line)
    if options.trace is not None:
        _write(Path(options.trace), step, question.names)
    return 0


def ask(config: Config, options: argparse.Namespace) -> Question:
    """The question that config file and options ask. Raises ConfigError."""
    names = [region.name for region in config.run.regions]
    stages, boundaries = len(names), len(names) - 1
    forward_ms = _numbers("--forward-ms", options.forward_ms, stages, least=0.0)
    backward_ms = _numbers("--backward-ms", options.backward_ms, stages, least=0.0)
    rtt_ms = _numbers("--rtt-ms", options.rtt_ms, boundaries, least=0.0)
    mbit = _numbers("--mbit", options.mbit, boundaries, least=0.001)
    kib = _numbers("--boundary-kib", options.boundary_kib, boundaries, least=0.0)
    activation_mib = options.activation_mib
    plan = config.run.plan
    count = options.microbatches
    if count is None:
        if plan.microbatches == "auto":
            raise ConfigError('run.plan.microbatches is "auto"; say how many with --microbatches N')
        count = plan.microbatches
    if not 1 <= count <= _MAX_MICROBATCHES:
        raise ConfigError(f"--microbatches must be from 1 to {_MAX_MICROBATCHES} (got {count})")
    costs = Costs(
        num_microbatches=count,
        forward_s=[ms / 1e3 for ms in forward_ms],
        backward_s=[ms / 1e3 for ms in backward_ms],
        latency_s=[ms / 2e3 for ms in rtt_ms],
        transfer_s=[size * 1024 * 8 / (rate * 1e6) for size, rate in zip(kib, mbit, strict=True)],
    )
    window = _window(options.window, stages) if options.window is not None else plan.window
    if window == "hide":
        windows: str | int | Sequence[int] = hiding_windows(costs)
    else:
        windows = planned_windows(costs) if window == "auto" else window
    return Question(
        names=names,
        costs=costs,
        windows=resolve_windows(windows, num_stages=stages, num_microbatches=count),
        activation_mib=_numbers("--activation-mib", activation_mib, stages, least=0.0)
        if activation_mib is not None
        else (),
        link=f"{options.rtt_ms} ms round trip, {options.mbit} Mbit/s, {options.boundary_kib} KiB",
    )


def hiding_windows(costs: Costs) -> tuple[int, ...]:
    """The windows that hide the links' delay."""
    delays_s = [sum(each) for each in zip(costs.latency_s, costs.transfer_s, strict=True)]
    # Stages that take no time would need windows without end.
    return windows_for_latency(delays_s, delays_s, slowest_s=max(costs.slowest_s, 1e-6))


def planned_windows(costs: Costs) -> tuple[int, ...]:
    """The windows that plan.window = "auto" would come to."""
    stages = [
        StageCosts(forward_s=(f,), backward_s=(b,))
        for f, b in zip(costs.forward_s, costs.backward_s, strict=True)
    ]
    ways = [
        DirectionCosts(latency_s=latency_s, transfer_s=transfer_s)
        for latency_s, transfer_s in zip(costs.latency_s, costs.transfer_s, strict=True)
    ]
    links = [LinkCosts(forward=way, backward=way) for way in ways]
    limits = Limits(num_microbatches=costs.num_microbatches, in_flight=[0] * len(stages))
    return choose_plan(stages, links, limits)[0].windows


def model_of(costs: Costs) -> PipelineModel:
    """The line that these costs describe: no spread, both directions of a link alike."""
    ways = [
        Direction(latency_s=latency_s, transfer_s=transfer_s)
        for latency_s, transfer_s in zip(costs.latency_s, costs.transfer_s, strict=True)
    ]
    return PipelineModel(
        stages=[
            StageTimes(forward_s=[f], backward_s=[b])
            for f, b in zip(costs.forward_s, costs.backward_s, strict=True)
        ],
        boundaries=[Boundary(forward=way, backward=way) for way in ways],
    )


def report(question: Question, step: Simulated, glyphs: Glyphs) -> Iterator[str]:
    """The lines to print, each of 80 columns at most."""
    costs, names = question.costs, question.names
    windows = ",".join(map(str, question.windows))
    yield f"{len(names)} regions, {costs.num_microbatches} microbatches, windows {windows}"
    if costs.latency_s:
        yield f"links: {question.link} a tensor"
    ideal_s, bound_s = ideal_step_s(costs), lower_bound_s(costs)
    yield f"step {step.step_s:.3f} s; ideal {ideal_s:.3f} s, lower bound {bound_s:.3f} s"
    yield ""
    yield from draw(step.trace, names, end_s=step.step_s, width=_WIDTH, glyphs=glyphs)
    yield glyphs.legend
    yield ""
    yield from _table(names, step)
    if question.activation_mib:
        yield ""
        yield from _memory(question, step)


def _memory(question: Question, step: Simulated) -> Iterator[str]:
    """What the most microbatches in flight keep in memory."""
    yield "activations at most"
    for name, peak, mib in zip(
        question.names, step.peak_in_flight, question.activation_mib, strict=True
    ):
        yield f"  {name}: {peak} x {mib:g} MiB = {peak * mib:.0f} MiB"


def _table(names: Sequence[str], step: Simulated) -> Iterator[str]:
    """Where each region's time goes, in percent of the step."""
    label = min(max(map(len, names)), 14)
    heads = ["busy", *CAUSES, "in flight"]
    widths = [max(6, len(head) + 1) for head in heads]
    head = "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    yield f"{'%':<{label}}{head}"
    for stage, causes in enumerate(idle_s(step)):
        shares = [step.busy_s(stage), *causes.values()]
        cells = [f"{100 * share / step.step_s if step.step_s else 0:.1f}" for share in shares]
        cells.append(str(step.peak_in_flight[stage]))
        row = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        yield f"{names[stage][:label]:<{label}}{row}"


def _write(path: Path, step: Simulated, names: Sequence[str]) -> None:
    try:
        path.write_text(json.dumps(chrome_events(step.trace, names)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
    print(f"\n{path}: open it at https://ui.perfetto.dev")


def _numbers(flag: str, text: str, count: int, *, least: float) -> list[float]:
    """One number for each, from one for all or a list. Raises ConfigError."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} must be numbers such as 20 or 20,40 (got {text})") from None
    if not all(least <= value <= 1e9 for value in values):
        raise ConfigError(f"{flag} must be from {least:g} to 1e9 (got {text})")
    if len(values) not in (1, count):
        raise ConfigError(f"{flag} needs one number, or {count} (got {len(values)})")
    return values * count if len(values) == 1 else values


def _window(text: str, num_stages: int) -> str | int | list[int]:
    if text in ("auto", "classic", "hide"):
        return text
    try:
        windows = [int(part) for part in text.split(",")]
    except ValueError:
        windows = []
    if not windows or min(windows) < 1 or len(windows) not in (1, num_stages):
        raise ConfigError(
            f"--window must be auto, classic, hide, one whole number or {num_stages} (got {text})"
        )
    return windows[0] if len(windows) == 1 else windows
