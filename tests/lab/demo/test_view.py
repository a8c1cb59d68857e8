"""One frame of the live view: that it says what it must, and fits."""

import io

import pytest
from rich.console import Console

from geotrain.lab.demo.options import Options
from geotrain.lab.demo.state import RunState
from geotrain.lab.demo.view import MIN_HEIGHT, MIN_WIDTH, frame, num_shown
from tests.lab.demo.running import running, status_record, step_line

SIZES = [(80, 24), (140, 40), (MIN_WIDTH, MIN_HEIGHT), (200, 60)]


def lines_of(state, *, width=80, height=24, ascii_only=False, **console):
    """The rows that a terminal of this size shows."""
    out = Console(file=io.StringIO(), width=width, height=height, force_terminal=False, **console)
    shown = frame(state, width=width, height=height, now=3.5, ascii_only=ascii_only)
    with out.capture() as capture:
        out.print(shown)
    return [line.rstrip() for line in capture.get().splitlines()]


def starting(row):
    return lambda lines: next(line for line in lines if line.startswith(row))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("regions", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("steps", [0, 1, 30])
def test_a_frame_fits_its_terminal_whatever_there_is_to_show(size, regions, steps):
    width, height = size
    state = running(regions, steps=steps)
    for number in range(50):
        event = {"at": number, "links": "x" * 90, "settings": {"loss": number}, "why": "weather"}
        state.changes.on_events([event])
    lines = lines_of(state, width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    # Every section is there, whole or not at all.
    shown = num_shown(regions, height=height)
    rows = [line for line in lines if line.startswith(state.regions[0].name)]
    assert len(rows) == (3 if shown > 1 else 2) - (steps == 0)
    assert any(line.startswith("what changed") for line in lines)
    assert any("more" in line for line in lines) == (shown < regions)


def test_a_stranger_finds_every_figure_at_80_columns():
    state = running(2)
    lines = lines_of(state)
    assert lines[0] == (
        "geotrain demo   step 3 of 30   1.00 s a step   4.10 k tokens/s   4 s in all"
    )
    assert lines[1] == "loss 5.500 █▅▁ 4.500"
    assert starting("region ")(lines).split() == [
        *("region", "now", "in", "flight", "bubble", "loss", "tokens/s")
    ]
    assert starting("virginia ")(lines).split() == [
        *("virginia", "waits:", "backward", "0", "4", "of", "4", "76%", "4.500", "4.10", "k")
    ]
    assert starting("frankfurt ")(lines).split()[4:7] == ["4", "of", "1"]
    assert starting("virginia-frankfurt")(lines).split() == [
        *("virginia-frankfurt", "102.3", "ms", "100/100", "12.0", "MB"),
        *("4.0", "MB", "25%", "0.00024"),
    ]
    assert "at 0.02 $ a GB: 0.00200 $ so far, 0.50 $ an hour, 1.000 $ a million tokens" in lines
    assert "nothing so far" in lines


def test_the_timeline_tells_forwards_from_backwards_without_colour():
    lines = lines_of(running(2), width=111)
    first, second = [line for line in lines if "▒" in line and "step" not in line]
    # 100 columns of 10 ms: forwards of two columns, backwards of four.
    assert first == "virginia   0▒1▒2▒3▒" + "·" * 32 + "0███1███2███3███" + "·" * 44
    assert second == "frankfurt  " + "·" * 5 + "0▒1▒2▒3▒" + "·" * 32 + "0███1███2███3███" + "·" * 39
    title = next(line for line in lines if "as each region ran it" in line)
    assert title == "step 3, as each region ran it   ▒▒ forward  ██ backward  ·· neither"
    axis = lines[lines.index(second) + 1]
    assert axis.split() == ["0", "0.50", "1.00", "s"]
    assert len(axis) == 111


def test_a_terminal_without_these_characters_gets_ascii():
    state = running(3)
    lines = lines_of(state, width=111, ascii_only=True)
    assert all(line.isascii() for line in lines)
    assert any(line.startswith("virginia   0f1f2f3f....") for line in lines)


def test_a_wide_terminal_shows_more():
    state = running(2)
    lines = lines_of(state, width=140, height=40)
    assert starting("region ")(lines).split()[-3:] == ["step", "computes", "waits"]
    assert starting("frankfurt ")(lines).split()[1:4] == ["3", "to", "5"]
    assert "102.3/100.0/101.0/104.0 ms" in starting("virginia-frankfurt")(lines)
    assert lines[0].endswith("Ctrl-C ends it")


def test_a_link_that_is_down_and_what_changed_are_told():
    state = running(2)
    down = status_record(0, options=state.options, state="down", reason="ping timeout")
    state.on_status(0, down, now=4.0)
    state.on_line(0, step_line(0, 4, options=state.options, windows=[6, 1]))
    lines = lines_of(state)
    assert "down 2 s" in starting("virginia-frankfurt")(lines)
    assert "    1.0  link virginia - frankfurt is down (ping timeout)" in lines
    assert "    3.0  windows 4,1 -> 6,1 from step 4 on" in lines


def test_the_newest_changes_are_the_ones_that_stay():
    state = running(2)
    for number in range(50):
        event = {"at": number, "links": f"n{number}", "settings": {"loss": 0}, "why": "script"}
        state.changes.on_events([event])
    lines = lines_of(state)
    assert len(lines) <= 24
    assert lines[-1].split()[1] == "n49:"


def test_before_the_first_step_it_says_that_it_starts():
    lines = lines_of(RunState(Options(), started_at=0.0))
    assert lines[0] == "geotrain demo   starting, 4 s   Ctrl-C ends it"
    assert starting("virginia ")(lines).split() == ["virginia", "starting", "-", "-", "-", "-"]
    assert starting("virginia-")(lines).split()[1:3] == ["-", "-/-"]


def test_after_the_end_nothing_runs_any_more():
    state = running(2, steps=30)
    for index in range(2):
        state.on_status(index, {"ranks": [], "links": {}, "egress": {}}, now=9.0)
    state.ended_at = 12.0
    lines = lines_of(state)
    assert lines[0].endswith("12 s in all")
    assert starting("frankfurt ")(lines).split()[1] == "done"


def test_colours_go_with_no_color_and_nothing_else_does():
    def text(**options):
        console = Console(
            file=io.StringIO(),
            force_terminal=True,
            width=80,
            height=24,
            color_system="standard",
            **options,
        )
        with console.capture() as capture:
            console.print(frame(running(2), width=80, height=24, now=3.5))
        return capture.get()

    assert "\x1b[36m" in text() and "\x1b[35m" in text()
    plain = text(no_color=True)
    assert "\x1b[3" not in plain.replace("\x1b[3;", "")
    assert "▒" in plain and "█" in plain
