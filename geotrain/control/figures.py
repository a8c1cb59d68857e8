"""What a region measured in a step, small enough to travel in its vote.

No clocks are compared between regions. A sender knows when it sent a tensor and when it heard that
the receiver took it; the receiver knows how long the tensor lay there before it was taken. What is
left is a round trip of the link: there with the tensor, and back with a few bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_ENTRIES = 64
"""Of each list: the microbatches that are reported. More would not change what is decided."""
_MAX_RECORDS = 4
RECORD = -1
"""Stands for a microbatch's number where a record was sent, which is next to nothing long."""


class Passage(NamedTuple):
    """A message that was sent and has been acknowledged; in microseconds of the sender."""

    step: int
    microbatch: int
    sent_us: int
    """Since some moment that all passages of one report share."""
    returned_us: int
    """From sending to acknowledgement."""


class Hold(NamedTuple):
    """How long a message lay at the receiver, from its arrival until it was taken."""

    step: int
    microbatch: int
    held_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One region's measurements, as of its last backward of a step.

    Acknowledgements of a step's last tensors come after that, and are in the next report.
    """

    forward_us: tuple[int, ...] = ()
    """Of the first microbatches, in order."""
    backward_us: tuple[int, ...] = ()
    sent_down: tuple[Passage, ...] = ()
    """Activations, and the record that opens the step, to the region behind."""
    sent_up: tuple[Passage, ...] = ()
    """Gradients, to the region ahead."""
    held_from_up: tuple[Hold, ...] = ()
    """Activations, and the record that opens the step, from the region ahead."""
    held_from_down: tuple[Hold, ...] = ()
    """Gradients, from the region behind."""
    in_flight_limit: int = 0
    """This site's bound on microbatches in flight; 0: none."""
    memory_limit: int = 0
    """The microbatches, of the size that the step had, that there is memory for; 0: not known."""
    slots_down: int = 0
    """Activations that the arenas hold on the way to the region behind; 0: not known."""
    slots_up: int = 0
    """Gradients, on the way to the region ahead."""

    def to_record(self) -> dict[str, Any]:
        """A map of numbers and flat lists; see MAX_ENTRIES for its size."""
        record: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        for name in _TIMES:
            record[name] = list(getattr(self, name)[:MAX_ENTRIES])
        for name in (*_PASSAGES, *_HOLDS):
            entries: Sequence[Iterable[int]] = getattr(self, name)[:MAX_ENTRIES]
            record[name] = [value for entry in entries for value in entry]
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Figures":
        """Read a peer's. Raises ValueError for what does not add up or is too long."""
        try:
            values: dict[str, Any] = {name: int(record[name]) for name in _NUMBERS}
            for name in _TIMES:
                values[name] = tuple(each for (each,) in _entries(record[name], 1))
            for name in _PASSAGES:
                values[name] = tuple(Passage(*each) for each in _entries(record[name], 4))
            for name in _HOLDS:
                values[name] = tuple(Hold(*each) for each in _entries(record[name], 3))
        except (KeyError, TypeError) as exc:
            raise ValueError(f"malformed figures: {exc!r}") from exc
        figures = cls(**values)
        numbers = [getattr(figures, name) for name in _NUMBERS]
        numbers += [*figures.forward_us, *figures.backward_us]
        numbers += [each.returned_us for each in (*figures.sent_down, *figures.sent_up)]
        numbers += [each.held_us for each in (*figures.held_from_up, *figures.held_from_down)]
        if min(numbers) < 0:
            raise ValueError("malformed figures: a time or a limit below zero")
        return figures


_NUMBERS = ("in_flight_limit", "memory_limit", "slots_down", "slots_up")
_TIMES = ("forward_us", "backward_us")
_PASSAGES = ("sent_down", "sent_up")
_HOLDS = ("held_from_up", "held_from_down")


def _entries(flat: Sequence[Any], width: int) -> list[tuple[int, ...]]:
    if len(flat) % width or len(flat) > width * MAX_ENTRIES:
        raise ValueError(
            f"malformed figures: {len(flat)} numbers, expected up to {MAX_ENTRIES} times {width}"
        )
    numbers = [int(value) for value in flat]
    return [tuple(numbers[at : at + width]) for at in range(0, len(numbers), width)]


@dataclass(slots=True)
class Matches:
    """Puts the two ends of a direction's messages together, across the border of a step."""

    _waiting: dict[tuple[int, int], Passage] = field(default_factory=dict)
    _held: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, passages: Iterable[Passage], holds: Iterable[Hold], *, step: int) -> list["Trip"]:
        """Take in what both ends reported at `step`. Returns the trips that are now known whole.

        What finds no counterpart within a step is forgotten.
        """
        self._waiting |= {(each.step, each.microbatch): each for each in passages}
        self._held |= {(each.step, each.microbatch): each.held_us for each in holds}
        trips = []
        for key in sorted(self._waiting.keys() & self._held.keys()):
            passage, held_us = self._waiting.pop(key), self._held.pop(key)
            if passage.returned_us <= held_us:
                continue  # a clock that was set, or a daemon that went and came back
            trips.append(
                Trip(
                    step=passage.step,
                    microbatch=passage.microbatch,
                    sent_s=passage.sent_us / 1e6,
                    way_s=(passage.returned_us - held_us) / 1e6,
                )
            )
        _forget(self._waiting, step)
        _forget(self._held, step)
        return trips


def _forget(left: dict[tuple[int, int], Any], step: int) -> None:
    records = [key for key in left if key[1] == RECORD]
    old = [key for key in left if key[1] != RECORD and key[0] < step - 1]
    # Records are numbered by another count than steps.
    for key in (*old, *records[:-_MAX_RECORDS]):
        left.pop(key)


class Trip(NamedTuple):
    """One message there and word of it back, without the time that it lay at the receiver."""

    step: int
    microbatch: int
    sent_s: float
    way_s: float
