"""The live view of a running demo: one frame out of what is known. Pure.

From top to bottom: where the run is, the loss, the regions, the links, the last step as each
region ran it, and what changed and why.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from geotrain.lab.demo import words
from geotrain.lab.demo.options import layer_ranges
from geotrain.lab.demo.state import RegionState, RunState
from geotrain.lab.demo.strips import ASCII, ASCII_SPARKS, BLOCKS, SPARKS, sparkline, timeline_row

MIN_WIDTH, MIN_HEIGHT = 80, 20
"""With less, lines say more than the view could."""
_WIDE = 110
"""Columns from which the tables have room for more."""
_NAME_WIDTH = 10
_TITLE, _DIM = "bold", "dim"
_KIND_STYLES = {"F": "cyan", "B": "magenta", None: "dim"}
_FIXED_ROWS = 12
"""Rows that are there whatever the number of regions; each region has three more."""


def frame(
    state: RunState, *, width: int, height: int, now: float, ascii_only: bool = False
) -> RenderableType:
    """What the terminal shows, in at most `height` rows of `width` columns.

    Where the regions do not all fit, the first are shown, in every section, and what changed has
    one row at least.
    """
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
        rows.append(_line((f"and {hidden} more: a taller window shows them", _DIM)))
        used += 1
    if shown > 1:
        rows += [Text(), _links(state, shown, wide=wide), _egress(state)]
        used += 2 + shown
    rows += [Text(), *_timeline(state, shown, width=width, ascii_only=ascii_only), Text()]
    used += 4 + shown
    rows += _changes(state, height - used - 1)
    return Group(*rows)


def num_shown(num_regions: int, *, height: int) -> int:
    """How many regions a frame of this height shows."""
    if _FIXED_ROWS + 3 * num_regions <= height:
        return num_regions
    return min(num_regions, max(1, (height - _FIXED_ROWS - 1) // 3))


def _line(*parts: str | tuple[str, str]) -> Text:
    text = Text.assemble(*parts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _table(*words_of: str, figures: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=_DIM)
    for column in words_of:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True, overflow="ellipsis")
    return table


def _head(state: RunState, *, wide: bool, now: float) -> Text:
    title = ("geotrain demo", _TITLE)
    spent_s = (state.ended_at or now) - state.started_at
    if not state.losses:
        return _line(title, f"   starting, {spent_s:.0f} s", ("   Ctrl-C ends it", _DIM))
    last = state.regions[0].lines[-1]
    return _line(
        title,
        f"   step {len(state.losses)} of {state.options.steps}",
        f"   {last.step_s:.2f} s a step   {words.count(last.num_tokens / last.step_s)} tokens/s",
        (f"   {spent_s:.0f} s in all", _DIM),
        ("   Ctrl-C ends it" if wide and not state.ended_at else "", _DIM),
    )


def _loss(state: RunState, *, width: int, ascii_only: bool) -> Text:
    if not state.losses:
        return _line(("loss", _DIM))
    first, last = f"{state.losses[0]:.3f}", f"{state.losses[-1]:.3f}"
    room = min(width, 100) - len(f"loss {first}  {last}")
    sparks = ASCII_SPARKS if ascii_only else SPARKS
    curve = sparkline(state.losses, width=room, sparks=sparks)
    return _line(("loss ", _DIM), f"{first} ", (curve, "green"), f" {last}")


# ---- regions


def _regions(state: RunState, shown: int, *, wide: bool) -> Table:
    figures = ("in flight", "bubble", "loss", "tokens/s")
    if not wide:
        table = _table("region", "now", figures=figures)
    else:
        table = _table("region", "layers", "now", figures=(*figures, "step", "computes", "waits"))
    table.columns[2 if wide else 1].min_width = 26  # or columns would jump as actions change
    for index, region in enumerate(state.regions[:shown]):
        first, last = layer_ranges(state.options.num_layers, len(state.regions))[index]
        cells: list[str | Text] = [words.shortened(region.name, _NAME_WIDTH)]
        cells += [f"{first} to {last - 1}"] if wide else []
        cells += [_action(region, state)]
        table.add_row(*cells, *_figures(region, index, wide=wide))
    return table


def _action(region: RegionState, state: RunState) -> Text:
    if len(state.regions) == 1:
        return Text("one process, no daemon", style=_DIM)
    text = words.action(region.action)
    if not text:
        return Text("done" if region.lines else "starting", style=_DIM)
    return Text(text, style="yellow" if text.startswith("wait") else "")


def _figures(region: RegionState, index: int, *, wide: bool) -> list[str]:
    if not region.lines:
        return ["-"] * (7 if wide else 4)
    line = region.lines[-1]
    figures = [
        f"{line.most_in_flight} of {line.windows[index]}",
        f"{line.bubble:.0%}",
        f"{line.loss:.3f}",
        words.count(line.num_tokens / line.step_s),
    ]
    if wide:
        spent = (line.attribution_s[name] for name in ("compute", "wait"))
        figures += [f"{line.step_s:.3f} s", *(f"{seconds:.3f} s" for seconds in spent)]
    return figures


# ---- links


def _links(state: RunState, shown: int, *, wide: bool) -> Table:
    round_trip = "RTT now/min/median/p99" if wide else "RTT now"
    rate = "Mbit/s out/back" if wide else "Mbit/s >/<"
    figures = (round_trip, rate, "WAN bytes", "saved", "$")
    table = _table("link", figures=figures)
    for one, other in state.links[: shown - 1]:
        there, back = one.link(other.name), other.link(one.name)
        wire = sum(int(end.get("bytes_sent", 0)) for end in (there, back))
        payload = sum(int(end.get("payload_bytes_sent", 0)) for end in (there, back))
        rates = (words.mbit(_rate(*ends)) for ends in ((there, back), (back, there)))
        names = (words.shortened(region.name, _NAME_WIDTH) for region in (one, other))
        table.add_row(
            "-".join(names),
            _round_trip(there, wide=wide),
            "/".join(rates),
            words.size(wire),
            words.saved(payload, wire),
            words.dollars(wire / 1e9 * state.options.usd_per_gb),
        )
    return table


def _rate(sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> float | None:
    """Bytes per second while they flow, as either end knows it: short bursts tell nothing."""
    sent: float | None = (sender.get("rate_bytes_per_s") or {}).get("send")
    received: float | None = (receiver.get("rate_bytes_per_s") or {}).get("receive")
    return received if sent is None else sent


def _round_trip(link: Mapping[str, Any], *, wide: bool) -> Text:
    state = link.get("state")
    if state is not None and state != "connected":
        return Text(f"{state} {link['since_s']:.0f} s", style="red")
    rtt_s = link.get("rtt_s") or {}
    if rtt_s.get("last") is None:
        return Text("-")
    names = ("last", "min", "p50", "p99") if wide else ("last",)
    return Text("/".join(f"{rtt_s[name] * 1e3:.1f}" for name in names) + " ms")


def _egress(state: RunState) -> Text:
    """What the daemons count, all sites together."""
    summaries = [(region.status or {}).get("egress") or {} for region in state.regions]

    def total(name: str) -> float:
        return sum(summary.get(name) or 0.0 for summary in summaries)

    text = (
        f"at {state.options.usd_per_gb:g} $ a GB: {words.dollars(total('usd_today'))} $ so far, "
        f"{total('usd_per_hour'):.2f} $ an hour, "
        f"{total('usd_per_million_tokens'):.3f} $ a million tokens"
    )
    return _line((text, _DIM))


# ---- the last step


def _timeline(state: RunState, shown: int, *, width: int, ascii_only: bool) -> list[Text]:
    glyphs = ASCII if ascii_only else BLOCKS
    lines = state.last_whole_step()
    if lines is None:
        return [_line(("the last step", _TITLE)), *(Text() for _ in range(shown + 1))]
    # The first region announces a step and is the last to know its end, so the step is its own.
    begin_s, end_s = lines[0].began_s, lines[0].ended_s
    columns = width - _NAME_WIDTH - 1
    title = _line(
        (f"step {lines[0].step}, as each region ran it", _TITLE),
        ("   ", ""),
        (glyphs.forward * 2, _KIND_STYLES["F"]),
        (" forward  ", _DIM),
        (glyphs.backward * 2, _KIND_STYLES["B"]),
        (" backward  ", _DIM),
        (glyphs.idle * 2, _KIND_STYLES[None]),
        (" neither", _DIM),
    )
    rows = [title]
    for region, line in zip(state.regions[:shown], lines, strict=False):
        runs = timeline_row(line.trace, begin_s=begin_s, end_s=end_s, width=columns, glyphs=glyphs)
        name = f"{words.shortened(region.name, _NAME_WIDTH):<{_NAME_WIDTH}} "
        rows.append(_line(name, *((text, _KIND_STYLES[kind]) for kind, text in runs)))
    return [*rows, _axis(end_s - begin_s, columns)]


def _axis(step_s: float, columns: int) -> Text:
    middle, end = f"{step_s / 2:.2f}", f"{step_s:.2f} s"
    scale = "0" + middle.rjust(columns // 2 - 1 + len(middle) // 2)
    return _line((" " * (_NAME_WIDTH + 1) + scale + end.rjust(columns - len(scale)), _DIM))


# ---- what changed


def _changes(state: RunState, room: int) -> list[Text]:
    """The title, and the newest changes in at most `room` rows, the newest last."""
    title = _line(("what changed, and why", _TITLE), ("   (seconds since the first step)", _DIM))
    changes = state.changes.all[-max(room, 1) :]
    if not changes:
        return [title, _line(("nothing so far", _DIM))]
    return [title, *(_line((f"{state.since_first_step(c):7.1f}  ", _DIM), str(c)) for c in changes)]
