"""A step drawn with characters: one row a stage, time from left to right."""

from collections.abc import Sequence
from dataclasses import dataclass

from geotrain.pipeline.timed import Timed, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """One character each; they differ in shape, so that they need no colour."""

    forward: str = "░"
    backward: str = "█"
    idle: str = "·"

    @property
    def legend(self) -> str:
        return f"{self.forward} forward  {self.backward} backward  {self.idle} idle"


ASCII = Glyphs(forward="f", backward="B", idle=".")
"""For terminals that know no others."""


def draw(
    trace: Trace, names: Sequence[str], *, end_s: float, width: int = 80, glyphs: Glyphs
) -> list[str]:
    """The rows and, below them, the time axis; no line is longer than `width`.

    A column is idle where its stage was for most of that time; else it stands for the kind of
    action that took the most.
    """
    label = min(max(map(len, names), default=0), width // 4)
    columns = width - label - 1
    lines = []
    for stage, name in enumerate(names):
        cells = _cells(trace.computing().row(stage), end_s, columns, glyphs)
        lines.append(f"{name[:label]:<{label}} {cells}")
    end = f"{end_s:.3f} s"
    lines.append(f"{'':<{label}} 0{end:>{columns - 1}}")
    return lines


def _cells(row: Sequence[Timed], end_s: float, columns: int, glyphs: Glyphs) -> str:
    spent_s = [{glyphs.forward: 0.0, glyphs.backward: 0.0} for _ in range(columns)]
    column_s = max(end_s, 1e-9) / columns
    for timed in row:
        glyph = glyphs.forward if timed.action.kind == "F" else glyphs.backward
        first = min(int(timed.begin_s / column_s), columns - 1)
        last = min(int(timed.end_s / column_s), columns - 1)
        for column in range(first, last + 1):
            begin_s = max(timed.begin_s, column * column_s)
            spent_s[column][glyph] += max(0.0, min(timed.end_s, (column + 1) * column_s) - begin_s)
    return "".join(_cell(spent, column_s, glyphs) for spent in spent_s)


def _cell(spent_s: dict[str, float], column_s: float, glyphs: Glyphs) -> str:
    idle_s = column_s - sum(spent_s.values())
    glyph = max(spent_s, key=spent_s.__getitem__)
    return glyph if sum(spent_s.values()) >= idle_s else glyphs.idle
