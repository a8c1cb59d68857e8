"""When a region did what in a step, small enough to travel in its vote.

Times are microseconds of the region's own monotonic clock, counted from `origin_us`. What two
regions' clocks differ by follows from the messages that went both ways between them: `joints.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_RUNS = 1024
"""Of forwards and of backwards each; further ones are not told of."""


class Ran(NamedTuple):
    """One forward or backward."""

    microbatch: int
    begin_us: int
    length_us: int
    came_us: int
    """When what it takes had come; where it takes nothing, when it began."""
    size_bytes: int
    """Of what a forward takes: the work in its microbatch. 0 for backwards."""

    @property
    def end_us(self) -> int:
        return self.begin_us + self.length_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """One region's step, as of its last backward."""

    origin_us: int = 0
    """Where the region's step began: its previous one had ended."""
    heard_us: int = 0
    """When word of this step came; in the first region, when it was given."""
    opened_us: int = 0
    """When word of it had gone on to the next region, and the first action could run."""
    loader_us: int = 0
    """How long the next batch was waited for, before all that."""
    user_us: int = 0
    """How long the user's code ran before it asked for this step, without the loader."""
    optimizer_us: int = 0
    """Norms, clipping and the optimizers of the step before."""
    coding_us: int = 0
    """Copying and coding between tensors and the arena, within the actions."""
    stalled_us: int = 0
    """The longest time by which a wait outlasted its limit: the process did not run at all."""
    forward: tuple[Ran, ...] = ()
    """In the order in which they ran."""
    backward: tuple[Ran, ...] = ()

    def to_record(self) -> dict[str, Any]:
        """A map of numbers and flat lists; see MAX_RUNS for its size."""
        record: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        for name in _RUNS:
            runs: Sequence[Ran] = getattr(self, name)[:MAX_RUNS]
            record[name] = [value for run in runs for value in run]
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Timings":
        """Read a peer's. Raises ValueError for what does not add up or is too long."""
        try:
            values: dict[str, Any] = {name: int(record[name]) for name in _NUMBERS}
            for name in _RUNS:
                values[name] = _runs(record[name])
        except (KeyError, TypeError) as exc:
            raise ValueError(f"malformed timings: {exc!r}") from exc
        return cls(**values)


_NUMBERS = (
    *("origin_us", "heard_us", "opened_us", "loader_us", "user_us", "optimizer_us"),
    *("coding_us", "stalled_us"),
)
_RUNS = ("forward", "backward")
_WIDTH = len(Ran._fields)


def _runs(flat: Sequence[Any]) -> tuple[Ran, ...]:
    if len(flat) % _WIDTH or len(flat) > _WIDTH * MAX_RUNS:
        raise ValueError(
            f"malformed timings: {len(flat)} numbers, expected up to {MAX_RUNS} times {_WIDTH}"
        )
    numbers = [int(value) for value in flat]
    runs = tuple(Ran(*numbers[at : at + _WIDTH]) for at in range(0, len(numbers), _WIDTH))
    if any(run.length_us < 0 or run.size_bytes < 0 for run in runs):
        raise ValueError("malformed timings: a time or a size below zero")
    return runs
