"""Pictures of one row: what a region ran in a step, and a curve. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from geotrain.pipeline.schedule import Kind
from geotrain.pipeline.trace import TracedAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What a column shows; told apart without colour."""

    forward: str = "▒"
    backward: str = "█"
    idle: str = "·"

    def of(self, kind: Kind | None) -> str:
        return {"F": self.forward, "B": self.backward, None: self.idle}[kind]


BLOCKS = Glyphs()
ASCII = Glyphs(forward="f", backward="B", idle=".")

Run = tuple[Kind | None, str]
"""What ran in neighbouring columns, and their characters."""


def timeline_row(
    trace: Sequence[TracedAction],
    *,
    begin_s: float,
    end_s: float,
    width: int,
    glyphs: Glyphs = BLOCKS,
) -> list[Run]:
    """`width` columns from `begin_s` to `end_s`, each showing what took most of its time.

    Where an action is wide enough it begins with the number of its microbatch.
    """
    owners = _owners(trace, begin_s, end_s, width)
    runs: list[Run] = []
    for owner, columns in groupby(owners):
        length = len(list(columns))
        if owner is None:
            runs.append((None, glyphs.idle * length))
            continue
        action = trace[owner]
        label = str(action.microbatch)
        label = label if len(label) < length else ""
        runs.append((action.kind, label + glyphs.of(action.kind) * (length - len(label))))
    return runs


def _owners(
    trace: Sequence[TracedAction], begin_s: float, end_s: float, width: int
) -> list[int | None]:
    """For each column the index of the action that has most of it, None where most is idle.

    Where many short actions share a column, the kind that has most of it is found first.
    """
    column_s = (end_s - begin_s) / width if width else 0.0
    if column_s <= 0:  # also where a step is shorter than a float can divide
        return [None] * width
    shares: list[dict[int, float]] = [{} for _ in range(width)]
    for index, action in enumerate(trace):
        first = max(0, int((action.begin_s - begin_s) / column_s))
        last = min(width - 1, int((action.end_s - begin_s) / column_s))
        for column in range(first, last + 1):
            left_s = begin_s + column * column_s
            overlap_s = min(action.end_s, left_s + column_s) - max(action.begin_s, left_s)
            if overlap_s > 0:
                shares[column][index] = overlap_s
    return [_owner(trace, share, column_s) for share in shares]


def _owner(trace: Sequence[TracedAction], share: dict[int, float], column_s: float) -> int | None:
    if sum(share.values()) < column_s / 2:
        return None
    spent: dict[Kind, float] = {"F": 0.0, "B": 0.0}
    for index, overlap_s in share.items():
        spent[trace[index].kind] += overlap_s
    kind: Kind = "F" if spent["F"] > spent["B"] else "B"
    return max((i for i in share if trace[i].kind == kind), key=lambda index: share[index])


SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "_.:-=+*#"


def sparkline(values: Sequence[float], *, width: int, sparks: str = SPARKS) -> str:
    """The values from the lowest to the highest spark, neighbours averaged to at most `width`.

    Values that are not numbers show as `!`.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(sparks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        sparks[round((mean - low) * scale)] if abs(mean) < float("inf") else "!" for mean in means
    )
