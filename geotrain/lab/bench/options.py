"""What `geotrain bench step` was asked for, and what follows from it without running anything."""

import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from geotrain.control.ideal import Costs, ideal_step_s
from geotrain.lab.demo.options import Options, socket_path
from geotrain.lab.settings import MSS_BYTES, LinkSettings
from geotrain.pipeline.window import resolve_windows, windows_for_latency

SEED = 20
_JITTER_DEVIATIONS = 2.0
"""Of a half-normal delay: one in twenty is longer."""
_RARE = 0.05
"""As share of the microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the processes that are measured need to know."""

    forward_s: list[float]
    """One a stage."""
    backward_s: list[float]
    boundary_bytes: int
    """A microbatch's tensor between two stages."""
    num_microbatches: int
    steps: int

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One call of `geotrain bench step`."""

    work: Work
    rtt_s: float = 0.1
    mbit: float = 1000.0
    loss: float = 0.0
    jitter_s: float = 0.0
    window: Literal["auto", "classic", "hide"] | tuple[int, ...] = "classic"
    congestion: Literal["bbr", "cubic"] | None = None
    """Of the sites' kernels and of geotrain's lanes; None leaves both as they are."""
    limit_s: float | None = None
    """How long one way of running the steps may take; None: by what is asked for."""
    emulator: Literal["auto", "netns", "relay"] = "auto"
    against_torch: bool = False
    json: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return Options(regions=self.work.num_stages).names

    @property
    def link(self) -> LinkSettings:
        """Every direction of every link."""
        rate = self.mbit * 1e6 / 8
        return LinkSettings.from_round_trip(
            self.rtt_s, rate_bytes_per_s=rate, jitter_s=self.jitter_s, loss=self.loss
        )

    @property
    def costs(self) -> Costs:
        work, boundaries = self.work, self.work.num_stages - 1
        transfer_s = work.boundary_bytes / (self.mbit * 1e6 / 8)
        return Costs(
            num_microbatches=work.num_microbatches,
            forward_s=work.forward_s,
            backward_s=work.backward_s,
            latency_s=[self.rtt_s / 2] * boundaries,
            transfer_s=[transfer_s] * boundaries,
        )

    @property
    def windows(self) -> tuple[int, ...]:
        """As the first region announces them; with "auto" those of the first step."""
        window = "classic" if self.window == "auto" else self.window
        return resolve_windows(
            self.hiding_windows if window == "hide" else window,
            num_stages=self.work.num_stages,
            num_microbatches=self.work.num_microbatches,
        )

    @property
    def hiding_windows(self) -> tuple[int, ...]:
        """Those that hide the links' delay, going by the figures asked for.

        One more than just enough at each boundary, for what the machine adds to those figures.
        """
        costs = self.costs
        pairs = zip(costs.latency_s, costs.transfer_s, strict=True)
        extra_s = _JITTER_DEVIATIONS * self.jitter_s + self._loss_delay_s
        delay_s = [latency_s + transfer_s + extra_s for latency_s, transfer_s in pairs]
        # Stages that take no time would need windows without end.
        slowest_s = max(costs.slowest_s, 1e-3)
        just_enough = windows_for_latency(delay_s, delay_s, slowest_s=slowest_s)
        boundaries = len(delay_s)
        return tuple(window + boundaries - stage for stage, window in enumerate(just_enough))

    @property
    def _loss_delay_s(self) -> float:
        """A round trip for what is sent again, where that is more than a rare exception."""
        segments = math.ceil(self.work.boundary_bytes / MSS_BYTES)
        meets_loss = 1 - (1 - self.loss) ** segments
        return self.rtt_s if meets_loss > _RARE else 0.0

    @property
    def variant_limit_s(self) -> float:
        """How long a way of running the steps may take before it is given up."""
        if self.limit_s is not None:
            return self.limit_s
        return 20.0 + self.work.steps * (5.0 + 8.0 * ideal_step_s(self.costs))


def site_toml(
    options: BenchOptions, index: int, *, folder: Path, listen: str, dial: str | None
) -> str:
    """The config file of region `index`; it dials the next region at host:port `dial`."""
    names, work = options.names, options.work
    lines = ["version = 1", "", "[run]", 'id = "bench"', f"seed = {SEED}"]
    lines += [f"global_batch = {work.num_microbatches}", ""]
    lines += ["[run.plan]", f"microbatches = {work.num_microbatches}"]
    window = "auto" if options.window == "auto" else list(options.windows)
    lines += [f"window = {json.dumps(window)}"]
    for position, name in enumerate(names):
        lines += ["", "[[run.regions]]", f'name = "{name}"']
        lines += [f'layers = "{position}:{position + 1}"']
    lines += ["", "[site]", f'name = "{names[index]}"', f'listen = "{listen}"']
    lines += ['status = "127.0.0.1:0"', f"arena_mib = {_arena_mib(options)}"]
    lines += [f"socket = {json.dumps(str(socket_path(folder, names[index])))}"]
    own_choice = json.dumps(options.congestion or "auto")
    lines += ["", "[site.link]", f"congestion = {own_choice}"]
    if index > 0:
        lines += ["", f"[site.peers.{names[index - 1]}]"]
    if dial is not None:
        lines += ["", f"[site.peers.{names[index + 1]}]", f'url = "http://{dial}"']
    return "\n".join(lines) + "\n"


def _arena_mib(options: BenchOptions) -> int:
    """Room for a whole window in each of a region's streams, so that memory is not measured."""
    windows = options.windows
    if options.window == "auto":  # which may come to hold everything
        windows = (options.work.num_microbatches,) * options.work.num_stages
    widest = max(a + b for a, b in itertools.pairwise((*windows, 1)))
    return 64 + 5 * (widest + 2) * options.work.boundary_bytes // (1 << 20)
