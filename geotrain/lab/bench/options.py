"""What `geotrain bench step` was asked for, and what follows from it without running anything."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from geotrain.control.ideal import Costs, ideal_step_s
from geotrain.lab.demo.options import Options, socket_path
from geotrain.lab.settings import MSS_BYTES, LinkSettings
from geotrain.pipeline.window import FIRST_MICROBATCHES, resolve_windows, windows_for_latency

SEED = 20
_JITTER_DEVIATIONS = 2.0
"""Of a half-normal delay: one in twenty is longer."""
_RARE = 0.05
"""As share of the microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the processes that are measured need to know."""

    forward_s: list[float]
    """Of a microbatch, whatever its samples; one a stage."""
    backward_s: list[float]
    boundary_bytes: int
    """A sample's tensor between two stages."""
    num_microbatches: int | Literal["auto"]
    steps: int
    num_samples: int | None = None
    """In a step's batch; None: one a microbatch."""
    forward_sample_s: float = 0.0
    """What each of a microbatch's samples adds, in every stage."""
    backward_sample_s: float = 0.0

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def global_batch(self) -> int:
        """Samples in a step."""
        if self.num_samples is not None:
            return self.num_samples
        assert self.num_microbatches != "auto", "nothing says how large the batch is"
        return self.num_microbatches

    @property
    def first_count(self) -> int:
        """Microbatches in the first step."""
        count = self.num_microbatches
        return min(FIRST_MICROBATCHES, self.global_batch) if count == "auto" else count

    def times_s(self, count: int) -> tuple[list[float], list[float]]:
        """Forward and backward of a mean microbatch where there are so many; one a stage."""
        size = self.global_batch / count
        return (
            [each + self.forward_sample_s * size for each in self.forward_s],
            [each + self.backward_sample_s * size for each in self.backward_s],
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Timed changes of the links, as written; see lab/script.py."""

    text: str
    file: str
    """Its name, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One call of `geotrain bench step`."""

    work: Work
    rtt_s: float = 0.1
    mbit: float = 1000.0
    loss: float = 0.0
    jitter_s: float = 0.0
    window: Literal["auto", "classic", "hide"] | tuple[int, ...] = "classic"
    memory_samples: int | None = None
    """The samples that each region may hold in flight; None: any number."""
    script: Script | None = None
    """Begins when the first step is done."""
    replay: Path | None = None
    """Whose plans to repeat; see control/journal.py."""
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
        """Every direction of every link, as the run begins."""
        rate = self.mbit * 1e6 / 8
        return LinkSettings.from_round_trip(
            self.rtt_s, rate_bytes_per_s=rate, jitter_s=self.jitter_s, loss=self.loss
        )

    @property
    def costs(self) -> Costs:
        """Of the first step."""
        return self.costs_with(self.work.first_count)

    def costs_with(
        self, count: int, links: Sequence[tuple[LinkSettings, LinkSettings]] | None = None
    ) -> Costs:
        """What a step costs, going by the figures asked for.

        Args:
            count: Of microbatches.
            links: Both directions of each; by default those with which the run begins.
        """
        work = self.work
        pairs = links or [(self.link, self.link)] * (work.num_stages - 1)
        size_bytes = work.boundary_bytes * work.global_batch / count
        forward_s, backward_s = work.times_s(count)
        return Costs(
            num_microbatches=count,
            forward_s=forward_s,
            backward_s=backward_s,
            latency_s=[(there.delay_s + back.delay_s) / 2 for there, back in pairs],
            transfer_s=[
                sum(size_bytes / (way.rate_bytes_per_s or math.inf) for way in pair) / 2
                for pair in pairs
            ],
        )

    @property
    def windows(self) -> tuple[int, ...]:
        """As the first region announces them; with "auto" those that are no wider than needed."""
        window = "classic" if self.window == "auto" else self.window
        return resolve_windows(
            self.hiding_windows if window == "hide" else window,
            num_stages=self.work.num_stages,
            num_microbatches=self.work.first_count,
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
        counts = {self.work.first_count, self.work.global_batch}
        if self.work.num_microbatches != "auto":
            counts = {self.work.num_microbatches}
        longest_s = max(ideal_step_s(self.costs_with(count)) for count in counts)
        return 20.0 + self.work.steps * (5.0 + 8.0 * longest_s)


def site_toml(
    options: BenchOptions, index: int, *, folder: Path, listen: str, dial: str | None
) -> str:
    """The config file of region `index`; it dials the next region at host:port `dial`."""
    names, work = options.names, options.work
    lines = ["version = 1", "", "[run]", 'id = "bench"', f"seed = {SEED}"]
    lines += [f"global_batch = {work.global_batch}", ""]
    lines += ["[run.plan]", f"microbatches = {json.dumps(work.num_microbatches)}"]
    window = "auto" if options.window == "auto" else list(options.windows)
    lines += [f"window = {json.dumps(window)}"]
    if options.replay is not None:
        lines += [f"replay = {json.dumps(str(options.replay.absolute()))}"]
    for position, name in enumerate(names):
        lines += ["", "[[run.regions]]", f'name = "{name}"']
        lines += [f'layers = "{position}:{position + 1}"']
    lines += ["", "[site]", f'name = "{names[index]}"', f'listen = "{listen}"']
    lines += ['status = "127.0.0.1:0"', f"arena_mib = {_arena_mib(options)}"]
    lines += [f"socket = {json.dumps(str(socket_path(folder, names[index])))}"]
    if index == 0:
        lines += [f"plan_log = {json.dumps(str(plan_log_path(folder)))}"]
    if options.memory_samples is not None:
        lines += ["", "[site.limits]", f"in_flight_samples = {options.memory_samples}"]
    own_choice = json.dumps(options.congestion or "auto")
    lines += ["", "[site.link]", f"congestion = {own_choice}"]
    if index > 0:
        lines += ["", f"[site.peers.{names[index - 1]}]"]
    if dial is not None:
        lines += ["", f"[site.peers.{names[index + 1]}]", f'url = "http://{dial}"']
    return "\n".join(lines) + "\n"


def plan_log_path(folder: Path) -> Path:
    """Where the first region notes its plans."""
    return folder / "plan.jsonl"


def times_path(folder: Path, name: str) -> Path:
    """Where a region's training process leaves what its microbatches took."""
    return folder / f"{name}.times.json"


def _arena_mib(options: BenchOptions) -> int:
    """Room for a whole window in each of a region's streams, so that memory is not measured."""
    work = options.work
    windows, size = options.windows, -(-work.global_batch // work.first_count)
    if options.window == "auto" or options.replay is not None:
        # Which may come to hold everything, or all that memory has room for.
        most, size = options.memory_samples or work.global_batch, 1
        windows = (min(most, work.global_batch),) * work.num_stages
    widest = max(a + b for a, b in itertools.pairwise((*windows, 1)))
    return 64 + 5 * (widest + 2) * size * work.boundary_bytes // (1 << 20)
