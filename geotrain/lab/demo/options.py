"""The demo's options, and the config files it writes for its regions."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from geotrain.lab.settings import LinkSettings

SEED = 20
BATCH = 32
CONTEXT = 128
LEAST_LAYERS = 6
MAX_REGIONS = 16
_NAMES = ("virginia", "frankfurt", "tokyo", "oregon", "dublin", "mumbai", "sydney", "oslo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `geotrain demo` was asked for."""

    regions: int = 2
    rtt_ms: float = 100.0
    mbit: float = 1000.0
    steps: int = 30
    microbatches: int = 8
    emulator: Literal["auto", "netns", "relay"] = "auto"
    loss: float = 0.0
    jitter_ms: float = 0.0
    script: Path | None = None
    codec: Literal["none", "planes"] = "none"
    usd_per_gb: float = 0.02
    verify: bool = False
    no_baseline: bool = False
    plain: bool = False
    json: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The regions in order along the model."""
        return tuple(
            _NAMES[index] if index < len(_NAMES) else f"region-{index}"
            for index in range(self.regions)
        )

    @property
    def num_layers(self) -> int:
        return max(LEAST_LAYERS, self.regions)

    @property
    def batch(self) -> int:
        """Samples a step; a microbatch needs one at least."""
        return max(BATCH, self.microbatches)

    @property
    def link(self) -> LinkSettings:
        """Every direction of every link."""
        return LinkSettings.from_round_trip(
            self.rtt_ms / 1e3,
            rate_bytes_per_s=self.mbit * 1e6 / 8,
            jitter_s=self.jitter_ms / 1e3,
            loss=self.loss,
        )

    @property
    def windows(self) -> list[int]:
        """Microbatches in flight in each region.

        As many as there are before the last, so that the delay of the links is paid once a step
        and not once a microbatch; the last region has its gradients at once.
        """
        return [self.microbatches] * (self.regions - 1) + [1]


def parse(argv: Sequence[str]) -> Options:
    """The options; argparse's own message and exit status 2 for what cannot be."""
    parser = argparse.ArgumentParser(
        prog="geotrain demo",
        description="Train a small model over several regions on this machine, joined by emulated "
        "long-distance links, on the source text of Python's standard library.",
    )
    add = parser.add_argument
    add("--regions", type=int, default=2, help="how many regions (default 2)")
    add("--rtt-ms", type=float, default=100.0, help="round trip of each link (default 100)")
    add("--mbit", type=float, default=1000.0, help="rate of each link, Mbit/s (default 1000)")
    add("--loss", type=float, default=0.0, help="probability that a segment is lost (default 0)")
    add("--jitter-ms", type=float, default=0.0, help="deviation of the delay (default 0)")
    add("--script", type=Path, metavar="FILE", help="timed changes; they begin with the first step")
    add(
        "--emulator",
        choices=("auto", "netns", "relay"),
        default="auto",
        help="network namespaces, relays, or what this machine allows (default)",
    )
    add("--steps", type=int, default=30, help="optimizer steps (default 30)")
    add("--microbatches", type=int, default=8, help="parts of each batch (default 8)")
    add("--codec", choices=("none", "planes"), default="none", help="how tensors travel")
    add(
        "--usd-per-gb",
        type=float,
        default=0.02,
        metavar="USD",
        help="price of a GB sent, for the dollars shown (default 0.02, an example price)",
    )
    add("--verify", action="store_true", help="compare with one plain torch process at the end")
    add(
        "--no-baseline",
        action="store_true",
        help="do not time a few steps of one plain torch process at the end",
    )
    add("--plain", action="store_true", help="lines instead of the live view, also in a terminal")
    add("--json", action="store_true", help="one JSON object a line on stdout")
    options = Options(**vars(parser.parse_args(argv)))
    checks = {
        f"--regions must be from 1 to {MAX_REGIONS}": 1 <= options.regions <= MAX_REGIONS,
        "--rtt-ms must be from 0 to 10000": 0 <= options.rtt_ms <= 10_000,
        "--mbit must be from 1 to 100000": 1 <= options.mbit <= 100_000,
        "--loss must be from 0 to 0.5": 0 <= options.loss <= 0.5,
        "--jitter-ms must be from 0 to 1000": 0 <= options.jitter_ms <= 1_000,
        "--usd-per-gb must be from 0 to 1000": 0 <= options.usd_per_gb <= 1_000,
        "--script needs links: 2 regions or more": options.script is None or options.regions > 1,
        "--steps must be at least 1": options.steps >= 1,
        "--microbatches must be from 1 to 256": 1 <= options.microbatches <= 256,
    }
    problems = [message for message, holds in checks.items() if not holds]
    if problems:
        parser.error("; ".join(problems))
    return options


def layer_ranges(num_layers: int, num_regions: int) -> list[tuple[int, int]]:
    """Half-open ranges, one a region; sizes differ by one at most, the larger first."""
    small, extra = divmod(num_layers, num_regions)
    ranges, first = [], 0
    for index in range(num_regions):
        last = first + small + (1 if index < extra else 0)
        ranges.append((first, last))
        first = last
    return ranges


def site_toml(options: Options, index: int, *, folder: Path, listen: str, dial: str | None) -> str:
    """The config file of region `index`; it dials the next region at host:port `dial`."""
    names = options.names
    lines = ["version = 1", "", "[run]", 'id = "demo"', f"seed = {SEED}"]
    lines += [f"steps = {options.steps}", f"global_batch = {options.batch}", ""]
    lines += ["[run.plan]", f"microbatches = {options.microbatches}"]
    lines += [f"window = {options.windows}", ""]
    lines += ["[run.compression]"]
    lines += [f'{what} = "{options.codec}"' for what in ("activations", "gradients")]
    for name, (first, last) in zip(
        names, layer_ranges(options.num_layers, options.regions), strict=True
    ):
        lines += ["", "[[run.regions]]", f'name = "{name}"', f'layers = "{first}:{last}"']
    lines += ["", "[site]", f'name = "{names[index]}"', f'listen = "{listen}"']
    lines += ['status = "127.0.0.1:0"', "arena_mib = 64"]
    lines += [f"socket = {json.dumps(str(socket_path(folder, names[index])))}"]
    price = f"egress_usd_per_gb = {options.usd_per_gb!r}"
    if index > 0:
        lines += ["", f"[site.peers.{names[index - 1]}]", price]
    if dial is not None:
        lines += ["", f"[site.peers.{names[index + 1]}]", f'url = "http://{dial}"', price]
    return "\n".join(lines) + "\n"


def socket_path(folder: Path, name: str) -> Path:
    """Where the region's ranks attach."""
    return folder / f"{name}.sock"


def ports_path(folder: Path, name: str) -> Path:
    """Where the region's daemon writes the ports it got."""
    return folder / f"{name}.sock.json"
