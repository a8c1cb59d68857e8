"""What a link of the lab is like, per direction, and which sites it joins."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self

from geotrain.errors import ConfigError

Topology = Literal["line", "mesh"]
Direction = tuple[str, str]
"""(source, target): the names of two sites that a link joins."""

MSS_BYTES, MTU_BYTES = 1448, 1500
"""Payload of a full TCP segment, and the segment with its headers."""
MAX_DELAY_S = 3600.0
MIN_RATE, MAX_RATE = 1.0, 1.25e11
"""Bytes a second."""
MAX_QUEUE_BYTES = 1 << 40
MIN_IDLE_S, MAX_IDLE_S = 0.001, 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """One direction of a link."""

    delay_s: float = 0.0
    """One way; half the round trip where both directions are alike."""
    rate_bytes_per_s: float | None = None
    """What the payload of a bulk TCP flow gets, as iperf3 shows it; None: as fast as the machine.

    Headers are charged on top, so that a full segment takes 1500/1448 of its payload's time.
    """
    jitter_s: float = 0.0
    """Deviation of a delay that is added to the one above, never negative; order is kept."""
    loss: float = 0.0
    """Probability that a segment is lost, each by itself, also within an offloaded packet."""
    queue_s: float = 0.2
    """What waits longer than this for its turn is dropped (the relay makes the sender wait)."""
    queue_bytes: int | None = None
    """The same in bytes; where set, it replaces `queue_s`."""
    idle_drop_s: float | None = None
    """A TCP connection silent for longer is forgotten, as by a NAT: nothing passes, no one told."""
    cut: bool = False
    """Nothing arrives, and what is under way is lost (the relay keeps it until mended)."""

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s", "queue_s"):
            self._check(name, 0, MAX_DELAY_S, "s")
        _require(0 <= self.loss <= 1, "loss", "must be a probability from 0 to 1", self.loss)
        if self.rate_bytes_per_s is not None:
            self._check("rate_bytes_per_s", MIN_RATE, MAX_RATE, "bytes/s, or None for any")
        if self.queue_bytes is not None:
            self._check("queue_bytes", 1, MAX_QUEUE_BYTES, "bytes, or None")
        if self.idle_drop_s is not None:
            self._check("idle_drop_s", MIN_IDLE_S, MAX_IDLE_S, "s, or None for never")

    def _check(self, name: str, low: float, high: float, unit: str) -> None:
        value = getattr(self, name)
        _require(low <= value <= high, name, f"must be {low:g} to {high:g} {unit}", value)

    @classmethod
    def from_round_trip(cls, rtt_s: float, **others: Any) -> Self:
        return cls(delay_s=rtt_s / 2, **others)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """The settings with these fields; also takes `rtt_s`, twice the delay."""
        values = dict(changes)
        if "rtt_s" in values:
            values["delay_s"] = values.pop("rtt_s") / 2
        unknown = sorted(values.keys() - {field.name for field in fields(self)})
        if unknown:
            raise ConfigError(f"a link has no setting called {', '.join(unknown)}")
        return replace(self, **values)

    def __str__(self) -> str:
        parts = [f"{self.delay_s * 1e3:g} ms one way"]
        rate = self.rate_bytes_per_s
        parts.append("any rate" if rate is None else f"{rate * 8e-6:g} Mbit/s")
        if self.jitter_s:
            parts.append(f"jitter {self.jitter_s * 1e3:g} ms")
        if self.loss:
            parts.append(f"loss {self.loss * 100:g} %")
        if self.queue_bytes is None:
            parts.append(f"queue {self.queue_s * 1e3:g} ms")
        else:
            parts.append(f"queue {self.queue_bytes / 1024:g} KiB")
        if self.idle_drop_s is not None:
            parts.append(f"forgets after {self.idle_drop_s:g} s of silence")
        return ", ".join([*parts, "CUT"] if self.cut else parts)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _require(holds: bool, name: str, allowed: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"link setting {name} {allowed} (got {value})")


_UNITS = {
    "rtt_ms": ("rtt_s", 1e-3),
    "delay_ms": ("delay_s", 1e-3),
    "mbit": ("rate_bytes_per_s", 1e6 / 8),
    "jitter_ms": ("jitter_s", 1e-3),
    "loss": ("loss", 1.0),
    "queue_ms": ("queue_s", 1e-3),
    "queue_kib": ("queue_bytes", 1024),
    "idle_drop_s": ("idle_drop_s", 1.0),
    "cut": ("cut", None),
}
"""The names that people write, on the command line and in scripts, and what they mean."""

USER_KEYS = tuple(_UNITS)


def in_base_units(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of LinkSettings out of what a person wrote. 0 for mbit or idle_drop_s means none."""
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name, factor = _UNITS[key]
        if factor is None:
            changes[name] = bool(value)
        elif name in ("rate_bytes_per_s", "idle_drop_s") and value == 0:
            changes[name] = None
        else:
            number = value * factor
            _require(math.isfinite(number), key, "must be a finite number", value)
            changes[name] = int(number) if name == "queue_bytes" else number
    return changes


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Fields of LinkSettings in the units that people use, such as "round trip 250 ms"."""
    return ", ".join(_describe(name, value) for name, value in settings.items())


def _describe(name: str, value: Any) -> str:
    match name:
        case "cut":
            return "cut" if value else "mended"
        case "loss":
            return f"loss {value * 100:g} %"
        case "rate_bytes_per_s":
            return "any rate" if value is None else f"{value * 8e-6:g} Mbit/s"
        case "idle_drop_s":
            return "never forgets" if value is None else f"forgets after {value:g} s of silence"
        case "queue_bytes":
            return "no limit in bytes" if value is None else f"queue {value / 1024:g} KiB"
    words = {"rtt_s": "round trip", "delay_s": "delay", "jitter_s": "jitter", "queue_s": "queue"}
    return f"{words.get(name, name)} {value * 1e3:g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which directions a change is for; without anything, all."""

    source: str | None = None
    target: str | None = None
    both: bool = False
    """Also the way back."""

    def pick(self, directions: Sequence[Direction]) -> list[Direction]:
        """Raises ConfigError where no link fits."""
        found = [direction for direction in directions if self._fits(direction)]
        if not found:
            links = ", ".join(f"{source} to {target}" for source, target in directions)
            raise ConfigError(f"there is no link {self}; there are: {links}")
        return found

    def _fits(self, direction: Direction) -> bool:
        ways = [direction, direction[::-1]] if self.both else [direction]
        return any(
            self.source in (None, source) and self.target in (None, target)
            for source, target in ways
        )

    def __str__(self) -> str:
        if self.source is None and self.target is None:
            return "every link"
        joint = "and" if self.both else "to"
        return f"{self.source or 'any site'} {joint} {self.target or 'any site'}"


def check_sites(sites: Sequence[str]) -> None:
    """Raises ConfigError unless there are two sites at least, with distinct plain names."""
    if len(sites) < 2 or len(set(sites)) < len(sites):
        raise ConfigError(f"a lab needs two sites at least, each with a name (got {list(sites)})")
    if len(sites) > 200:
        raise ConfigError(f"a lab has 200 sites at most (got {len(sites)})")
    for name in sites:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"a site's name has letters, digits, - and _ only (got {name!r})")


def directions_of(sites: Sequence[str], topology: Topology) -> list[Direction]:
    """Every direction of every link: of neighbours in a line, or of all pairs."""
    in_line, all_pairs = itertools.pairwise(sites), itertools.combinations(sites, 2)
    pairs = list(all_pairs if topology == "mesh" else in_line)
    return [way for pair in pairs for way in (pair, pair[::-1])]


def path_between(
    source: str, target: str, sites: Sequence[str], topology: Topology
) -> list[Direction]:
    """The directions that what is sent from `source` to `target` passes, in order."""
    if topology == "mesh":
        return [(source, target)]
    first, last = sites.index(source), sites.index(target)
    step = 1 if last > first else -1
    names = [sites[index] for index in range(first, last + step, step)]
    return list(itertools.pairwise(names))


def joined(parts: Iterable[LinkSettings]) -> LinkSettings:
    """One direction like several in a row."""
    links = list(parts)
    rates = [link.rate_bytes_per_s for link in links if link.rate_bytes_per_s is not None]
    idles = [link.idle_drop_s for link in links if link.idle_drop_s is not None]
    sizes = [link.queue_bytes for link in links if link.queue_bytes is not None]
    arriving = 1.0
    for link in links:
        arriving *= 1 - link.loss
    return LinkSettings(
        delay_s=sum(link.delay_s for link in links),
        rate_bytes_per_s=min(rates, default=None),
        jitter_s=sum(link.jitter_s**2 for link in links) ** 0.5,
        loss=1 - arriving,
        queue_s=min(link.queue_s for link in links),
        queue_bytes=min(sizes, default=None),
        idle_drop_s=min(idles, default=None),
        cut=any(link.cut for link in links),
    )
