"""One frame of the live view: that it says what it must, and fits."""

import io

import pytest
from rich.console import Console

from geotrain.lab.demo.options import Options
from geotrain.lab.demo.state import RunState
from geotrain.lab.demo.view import MIN_HEIGHT, MIN_WIDTH, frame, num_shown
from tests.lab.demo.running import running, status_record, step_line

SIZES = [(80, 24), (140, 40), (MIN_WIDTH, MIN_HEIGHT), (200, 60)]


def lines_of(state, *, width=80, height=24, now=3.5, ascii_only=False, **console):
    """The rows that a terminal of this size shows."""
    out = Console(file=io.StringIO(), width=width, height=height, force_terminal=False, **console)
    shown = frame(state, width=width, height=height, now=now, ascii_only=ascii_only)
    with out.capture() as capture:
        out.print(shown)
    return [line.rstrip() for line in capture.get().splitlines()]


def starting(row):
    return lambda lines: next(line for line in lines if line.startswith(row))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("regions", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("steps", [0, 1, 30])
@pytest.mark.parametrize("codec", ["none", "planes"])
def test_a_frame_fits_its_terminal_whatever_there_is_to_show(size, regions, steps, codec):
    width, height = size
    state = running(regions, steps=steps, codec=codec)
    state.emulator = "relay: not namespaces, since " + "x" * 300
    for number in range(50):
        event = {"at": number, "links": "x" * 90, "settings": {"loss": number}, "why": "weather"}
        state.changes.on_events([event])
    lines = lines_of(state, width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    if steps == 0:
        assert any(line.startswith("starting: ") for line in lines)
        return
    # Every section is there, whole or not at all.
    shown = num_shown(regions, height=height)
    rows = [line for line in lines if line.startswith(state.regions[0].name)]
    assert len(rows) == (3 if shown > 1 else 2)
    assert any(line.startswith("what changed") for line in lines)
    assert any("more" in line for line in lines) == (shown < regions)


def test_a_stranger_finds_every_figure_at_80_columns():
    state = running(2, codec="planes")
    for index in range(2):
        later = status_record(index, options=state.options, bytes_sent=8_000_000)
        state.on_status(index, status_record(index, options=state.options), now=3.0)
        state.on_status(index, later, now=3.5)
    lines = lines_of(state)
    assert lines[0] == (
        "geotrain demo   step 3 of 30   1.00 s a step   4.10 k tokens/s   4 s in all"
    )
    assert lines[1] == "loss 5.500 █▅▁ 4.500"
    assert starting("region ")(lines).split() == [
        *("region", "now", "in", "flight", "bubble", "mostly", "tokens/s")
    ]
    assert starting("virginia ")(lines).split() == [
        *("virginia", "waits:", "backward", "0", "4", "of", "4", "76%", "drain", "60%", "4.10", "k")
    ]
    assert starting("frankfurt ")(lines).split()[4:7] == ["4", "of", "1"]
    assert starting("virginia-frankfurt")(lines).split() == [
        *("virginia-frankfurt", "102.3", "ms", "100/100", "16.0", "MB", "-", "0.00032"),
    ]
    assert "at 0.02 $ a GB: 0.00032 $ so far, 0.58 $ an hour, 1.000 $ a million tokens" in lines
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
    assert starting("region ")(lines).split()[-3:] == ["tokens/s", "step", "computes"]
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


def test_a_long_reason_has_the_rows_that_are_free_and_the_newest_come_first():
    state = running(2)
    why = "the submarine cable is repaired and traffic takes the long way round " * 2
    for number in range(2):
        event = {"at": number, "links": f"n{number}", "settings": {"loss": 0}, "why": why.strip()}
        state.changes.on_events([event])
    told = "".join(lines_of(state, height=40)).replace(" ", "")
    assert told.count(why.replace(" ", "")) == 2
    # At 20 rows there are three: one for the older, two for the newer.
    older, newer, more = lines_of(state, height=20)[-3:]
    assert older.split()[1] == "n0:" and older.endswith(" ...")
    assert newer.split()[1] == "n1:" and more.endswith(" ...")
    assert more.startswith(" " * 9)


def test_the_foot_says_what_emulates_the_links_where_a_row_is_free():
    state = running(2)
    state.emulator = "relay: not namespaces, since " + "x" * 90
    lines = lines_of(state)
    assert lines[-1].startswith("links emulated by relay: not namespaces, since xxx")
    assert len(lines[-1]) == 80


def test_a_link_without_an_answer_and_an_old_step_are_counted_up():
    for codec, told in (("none", "no answer for 9 s"), ("planes", "no answer 9 s")):
        state = running(2, codec=codec)
        for index in range(2):
            state.on_status(index, status_record(index, options=state.options), now=12.0)
        lines = lines_of(state, now=15.0)
        assert lines[0] == "geotrain demo   step 3 of 30   no step for 12 s   15 s in all"
        row = starting("virginia-frankfurt")(lines)
        assert told in row and "-/-" in row and "102.3" not in row
        assert row.split()[-1] == "0.00024"
    for index in range(2):
        back = status_record(index, options=state.options, bytes_received=7_000_000)
        state.on_status(index, back, now=12.5)
    assert "102.3 ms" in starting("virginia-frankfurt")(lines_of(state, now=15.0))


def test_columns_and_sums_without_a_meaning_are_left_out():
    lines = lines_of(running(2))
    header = "link RTT now Mbit/s out/back WAN bytes $"
    assert " ".join(starting("link ")(lines).split()) == header
    free = lines_of(running(2, usd_per_gb=0.0))
    assert " ".join(starting("link ")(free).split()) == header.removesuffix(" $")
    state = running(2)
    for index in range(2):
        state.on_status(index, status_record(index, options=state.options, bytes_sent=0), now=3.0)
    for shown in (free, lines_of(state)):
        assert not any("a GB" in line for line in shown)
    wide = lines_of(running(2, codec="planes"), width=140)
    assert "4.0 MB 25%" in starting("virginia-f")(wide)
    narrow = lines_of(running(2, codec="planes"))
    assert starting("virginia-f")(narrow).split()[-2:] == ["25%", "0.00024"]


def test_before_the_first_step_it_says_what_is_started():
    state = RunState(Options(), started_at=0.0)
    state.emulator = "relay: " + "no namespaces " * 10
    lines = lines_of(state)
    assert lines[:2] == [
        "geotrain demo   Ctrl-C ends it",
        "starting: 2 daemons start, training processes import torch ... 4 s",
    ]
    assert lines[3].startswith("links emulated by relay: no namespaces")
    assert not any(line.startswith(("region", "virginia")) for line in lines)


def test_after_the_end_nothing_runs_any_more():
    state = running(2, steps=30)
    for index in range(2):
        state.on_status(index, {"ranks": [], "links": {}, "egress": {}}, now=9.0)
    state.ended_at = 12.0
    lines = lines_of(state)
    assert lines[0].endswith("12 s in all")
    assert starting("frankfurt ")(lines).split()[1:4] == ["done", "-", "76%"]


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
