"""The errors a user can meet, in one tree, with their data as attributes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class GeotrainError(Exception):
    """The root of every error that geotrain raises for a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong in a config file."""

    file: str
    key: str
    value: str
    """The value as written, shortened; empty where the key is missing."""
    allowed: str
    """What would be right, with the remedy."""

    def __str__(self) -> str:
        got = f" (got {self.value})" if self.value else ""
        return f"{self.file}: {self.key}: {self.allowed}{got}"


class ConfigError(GeotrainError):
    """A config file, an argument or an environment that cannot work; every problem at once."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        if isinstance(problems, str):
            self.problems: tuple[Problem, ...] = ()
            super().__init__(problems)
        else:
            self.problems = tuple(problems)
            super().__init__("\n".join(str(problem) for problem in self.problems))


class AttachError(GeotrainError):
    """The daemon of this region cannot be reached, or refused this rank; says why."""


class RegionError(GeotrainError):
    """What ended a run: one error, the same in every region.

    Attributes:
        region: Where it happened.
        kind: "exception", "lost", "left", "mismatch", "boundary", "call", "batch", "targets",
            "config", "link", "daemon", "restarted" or "poisoned".
        detail: What happened and what to do, without the place.
        step, microbatch: Where in the run, or None.
        key: The action or tensor, such as "forward over boundary 0", or None.
    """

    def __init__(
        self,
        *,
        region: str,
        kind: str,
        detail: str,
        step: int | None = None,
        microbatch: int | None = None,
        key: str | None = None,
    ) -> None:
        self.region = region
        self.kind = kind
        self.detail = detail
        self.step = step
        self.microbatch = microbatch
        self.key = key
        place = [f"region {region}"]
        if step is not None:
            place.append(f"step {step}")
        if microbatch is not None:
            place.append(f"microbatch {microbatch}")
        if key is not None:
            place.append(key)
        super().__init__(f"{', '.join(place)}: {detail}")

    def to_record(self) -> dict[str, Any]:
        """The error as a msgpack-able map, so that every region raises the same one."""
        return {
            "region": self.region,
            "kind": self.kind,
            "detail": self.detail,
            "step": self.step,
            "microbatch": self.microbatch,
            "key": self.key,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "RegionError":
        def integer(name: str) -> int | None:
            value = record.get(name)
            return value if isinstance(value, int) else None

        key = record.get("key")
        return cls(
            region=str(record.get("region", "?")),
            kind=str(record.get("kind", "exception")),
            detail=str(record.get("detail", "")),
            step=integer("step"),
            microbatch=integer("microbatch"),
            key=str(key) if key is not None else None,
        )
