"""The plans that a run's steps were under, one JSON object a line, so that a run can be repeated.

A line holds from its step on, until the next one. A run that is resumed goes on in the same file:
its first line then takes the place of what the file had from that step on.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line."""

    step: int
    """The first step under this plan, from 1."""
    num_microbatches: int
    windows: tuple[int, ...]
    why: str = ""

    def __post_init__(self) -> None:
        if self.step < 1 or self.num_microbatches < 1 or not self.windows or min(self.windows) < 1:
            raise ValueError("a step, a count or a window below 1")

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Entry":
        """Raises ValueError for what is no such line."""
        try:
            record = json.loads(line)
            return cls(
                step=int(record["step"]),
                num_microbatches=int(record["num_microbatches"]),
                windows=tuple(int(window) for window in record["windows"]),
                why=str(record.get("why", "")),
            )
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"no plan: {exc!r}") from exc


class Journal:
    """All lines of a file."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries: list[Entry] = []
        for entry in entries:
            while self._entries and self._entries[-1].step >= entry.step:
                self._entries.pop()
            self._entries.append(entry)

    @classmethod
    def parse(cls, text: str) -> "Journal":
        """Raises ValueError that names the first line that is no plan."""
        entries = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    entries.append(Entry.from_line(line))
                except ValueError as exc:
                    raise ValueError(f"line {number}: {exc}") from exc
        return cls(entries)

    def at(self, step: int) -> Entry | None:
        """The plan of a step; None before the first line."""
        return next((each for each in reversed(self._entries) if each.step <= step), None)
