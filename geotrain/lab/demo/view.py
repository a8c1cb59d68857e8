"""The live view of a running demo: one frame out of what is known. Pure.

From top to bottom: where the run is, the loss, the regions, the links, the last step as each
region ran it, and what changed and why.
"""

import textwrap

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from geotrain.lab.demo import words
from geotrain.lab.demo.changes import Change
from geotrain.lab.demo.links import egress_row, links_table
from geotrain.lab.demo.options import layer_ranges
from geotrain.lab.demo.state import RegionState, RunState
from geotrain.lab.demo.strips import ASCII, ASCII_SPARKS, BLOCKS, SPARKS, sparkline, timeline_row
from geotrain.lab.demo.tables import DIM, NAME_WIDTH, line_of, table_of

MIN_WIDTH, MIN_HEIGHT = 80, 20
"""With less, lines say more than the view could."""
_WIDE = 110
"""Columns from which the tables have room for more."""
_TITLE = "bold"
_KIND_STYLES = {"F": "cyan", "B": "magenta", None: "dim"}
_FIXED_ROWS = 12
"""Rows that are there whatever the number of regions; each region has three more."""


def frame(
    state: RunState, *, width: int, height: int, now: float, ascii_only: bool = False
) -> RenderableType:
    """What the terminal shows, in at most `height` rows of `width` columns.

    Where the regions do not all fit, the first are shown, in every section, and what changed has
    one row at least. Before the first step there is only what is being started.
    """
    if not state.losses:
        return Group(*_starting(state, width=width, height=height, now=now))
    shown = num_shown(len(state.regions), height=height)
    hidden = len(state.regions) - shown
    wide = width >= _WIDE
    rows: list[RenderableType] = [
        _head(state, wide=wide, now=now),
        _loss(state, width=width, ascii_only=ascii_only),
        Text(),
        _regions(state, shown, wide=wide),
    ]
    used = 4 + shown
    if hidden:
        rows.append(line_of((f"and {hidden} more: a taller window shows them", DIM)))
        used += 1
    if shown > 1:
        rows += [Text(), links_table(state, shown, wide=wide), egress_row(state)]
        used += 2 + shown
    rows += [Text(), *_timeline(state, shown, width=width, ascii_only=ascii_only), Text()]
    used += 4 + shown
    room = height - used - 1
    foot = [line_of((_emulated(state), DIM))] if state.emulator and shown > 1 and room > 2 else []
    return Group(*rows, *_changes(state, room - len(foot), width=width), *foot)


def num_shown(num_regions: int, *, height: int) -> int:
    """How many regions a frame of this height shows."""
    if _FIXED_ROWS + 3 * num_regions <= height:
        return num_regions
    return min(num_regions, max(1, (height - _FIXED_ROWS - 1) // 3))


def _head(state: RunState, *, wide: bool, now: float) -> Text:
    title = ("geotrain demo", _TITLE)
    spent_s = (state.ended_at or now) - state.started_at
    last = state.regions[0].lines[-1]
    pace = f"{last.step_s:.2f} s a step   {words.count(last.num_tokens / last.step_s)} tokens/s"
    stale_s = state.stale_s(now=now)
    return line_of(
        title,
        f"   step {len(state.losses)} of {state.options.steps}   ",
        pace if stale_s is None else (f"no step for {stale_s:.0f} s", "red"),
        (f"   {spent_s:.0f} s in all", DIM),
        ("   Ctrl-C ends it" if wide and not state.ended_at else "", DIM),
    )


def _starting(state: RunState, *, width: int, height: int, now: float) -> list[Text]:
    """What is being started, since when, and on what kind of links."""
    spent_s = (state.ended_at or now) - state.started_at
    rows = [
        line_of(("geotrain demo", _TITLE), ("   Ctrl-C ends it", DIM)),
        line_of(f"starting: {state.starting()} ... {spent_s:.0f} s"),
    ]
    if state.emulator and len(state.regions) > 1:
        rows += [Text(), *(line_of((text, DIM)) for text in textwrap.wrap(_emulated(state), width))]
    if state.changes.all:
        rows += [Text(), *_changes(state, height - len(rows) - 2, width=width)]
    return rows


def _emulated(state: RunState) -> str:
    return f"links emulated by {state.emulator}"


def _loss(state: RunState, *, width: int, ascii_only: bool) -> Text:
    first, last = f"{state.losses[0]:.3f}", f"{state.losses[-1]:.3f}"
    room = min(width, 100) - len(f"loss {first}  {last}")
    sparks = ASCII_SPARKS if ascii_only else SPARKS
    curve = sparkline(state.losses, width=room, sparks=sparks)
    return line_of(("loss ", DIM), f"{first} ", (curve, "green"), f" {last}")


# ---- regions


def _regions(state: RunState, shown: int, *, wide: bool) -> Table:
    figures = ("in flight", "bubble", "mostly", "tokens/s")
    if not wide:
        table = table_of("region", "now", figures=figures)
    else:
        table = table_of("region", "layers", "now", figures=(*figures, "step", "computes"))
    table.columns[2 if wide else 1].min_width = 26  # or columns would jump as actions change
    for index, region in enumerate(state.regions[:shown]):
        first, last = layer_ranges(state.options.num_layers, len(state.regions))[index]
        cells: list[str | Text] = [words.shortened(region.name, NAME_WIDTH)]
        cells += [f"{first} to {last - 1}"] if wide else []
        cells += [_action(region, state)]
        table.add_row(*cells, *_figures(region, state, index, wide=wide))
    return table


def _action(region: RegionState, state: RunState) -> Text:
    if len(state.regions) == 1:
        return Text("one process, no daemon", style=DIM)
    text = words.action(region.action)
    if not text:
        return Text("done" if region.lines else "starting", style=DIM)
    return Text(text, style="yellow" if text.startswith("wait") else "")


def _figures(region: RegionState, state: RunState, index: int, *, wide: bool) -> list[str]:
    if not region.lines:
        return ["-"] * (6 if wide else 4)
    line = region.lines[-1]
    figures = [
        "-" if state.ended_at else f"{line.most_in_flight} of {line.windows[index]}",
        f"{line.bubble:.0%}",
        words.largest_wait(line.attribution_s),
        words.count(line.num_tokens / line.step_s),
    ]
    if wide:
        figures += [f"{line.step_s:.3f} s", f"{line.attribution_s['compute']:.3f} s"]
    return figures


# ---- the last step


def _timeline(state: RunState, shown: int, *, width: int, ascii_only: bool) -> list[Text]:
    glyphs = ASCII if ascii_only else BLOCKS
    lines = state.last_whole_step()
    if lines is None:
        return [line_of(("the last step", _TITLE)), *(Text() for _ in range(shown + 1))]
    # The first region announces a step and is the last to know its end, so the step is its own.
    begin_s, end_s = lines[0].began_s, lines[0].ended_s
    columns = width - NAME_WIDTH - 1
    title = line_of(
        (f"step {lines[0].step}, as each region ran it", _TITLE),
        ("   ", ""),
        (glyphs.forward * 2, _KIND_STYLES["F"]),
        (" forward  ", DIM),
        (glyphs.backward * 2, _KIND_STYLES["B"]),
        (" backward  ", DIM),
        (glyphs.idle * 2, _KIND_STYLES[None]),
        (" neither", DIM),
    )
    rows = [title]
    for region, line in zip(state.regions[:shown], lines, strict=False):
        runs = timeline_row(line.trace, begin_s=begin_s, end_s=end_s, width=columns, glyphs=glyphs)
        name = f"{words.shortened(region.name, NAME_WIDTH):<{NAME_WIDTH}} "
        rows.append(line_of(name, *((text, _KIND_STYLES[kind]) for kind, text in runs)))
    return [*rows, _axis(end_s - begin_s, columns)]


def _axis(step_s: float, columns: int) -> Text:
    middle, end = f"{step_s / 2:.2f}", f"{step_s:.2f} s"
    scale = "0" + middle.rjust(columns // 2 - 1 + len(middle) // 2)
    return line_of((" " * (NAME_WIDTH + 1) + scale + end.rjust(columns - len(scale)), DIM))


# ---- what changed


def _changes(state: RunState, room: int, *, width: int) -> list[Text]:
    """The title, and the newest changes in at most `room` rows (one at least), the newest last."""
    title = line_of(("what changed, and why", _TITLE), ("   (seconds since the first step)", DIM))
    changes = state.changes.all[-max(room, 1) :]
    if not changes:
        return [title, line_of(("nothing so far", DIM))]
    rows: list[Text] = []
    free = room - len(changes)  # beyond a row each, for what is longer, the newest first
    for change in reversed(changes):
        own = _change_rows(state, change, width=width, max_rows=1 + max(free, 0))
        free -= len(own) - 1
        rows = own + rows
    return [title, *rows]


def _change_rows(state: RunState, change: Change, *, width: int, max_rows: int) -> list[Text]:
    first = f"{state.since_first_step(change):7.1f}  "
    texts = textwrap.wrap(
        str(change), width - len(first), max_lines=max_rows, placeholder=" ..."
    ) or [""]
    return [
        line_of((first if number == 0 else " " * len(first), DIM), text)
        for number, text in enumerate(texts)
    ]
