"""Scripts of timed changes."""

from pathlib import Path

import pytest

from geotrain.errors import ConfigError
from geotrain.lab.script import Change, parse_script, read_script
from geotrain.lab.settings import USER_KEYS, Selection

WAYS = [("a", "b"), ("b", "a")]


def parse(text: str) -> list[Change]:
    return parse_script(text, file="weather.toml", directions=WAYS)


def test_changes_come_in_the_order_of_their_times():
    late, early = parse(
        """
        [[change]]
        at_s = 20
        from = "a"
        to = "b"
        cut = true
        [[change]]
        at_s = 5.5
        between = ["b", "a"]
        rtt_ms = 250
        loss = 0
        why = "the cable is repaired"
        """
    )[::-1]
    assert early == Change(
        at_s=5.5,
        selection=Selection(source="b", target="a", both=True),
        settings={"rtt_s": 0.25, "loss": 0.0},
        why="the cable is repaired",
    )
    assert late.selection == Selection(source="a", target="b")
    assert str(early) == "at 5.5 s b and a: rtt_s 0.25, no loss (the cable is repaired)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at_s = 3", "a list of"),
        ("change = 3", "a list of"),
        ("[[change", "weather.toml: "),
        ("[[change]]\nrtt_ms = 3", "change 1: at_s must be"),
        ("[[change]]\nat_s = true\nrtt_ms = 3", "change 1: at_s must be"),
        ("[[change]]\nat_s = 1", "it changes nothing"),
        ("[[change]]\nat_s = 1\nspeed = 3", "unknown key speed; there are: at_s, between"),
        ("[[change]]\nat_s = 1\nrtt_ms = 'x'", "rtt_ms must be a number"),
        ("[[change]]\nat_s = 1\ncut = 1", "cut must be true or false"),
        ("[[change]]\nat_s = 1\nloss = 2", "must be a probability"),
        ("[[change]]\nat_s = 1\nloss = 0\nfrom = 'x'", "no link x to any site"),
        ("[[change]]\nat_s = 1\nloss = 0\nbetween = ['a']", "between must be two sites"),
        ("[[change]]\nat_s = 1\nloss = 0\nbetween = ['a', 'b']\nto = 'b'", "not both"),
    ],
)
def test_a_wrong_script_says_where_and_what(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the script"):
        read_script(tmp_path / "none.toml")


NUMBERS = [f"{key} = {value}" for key in USER_KEYS for value in ("nan", "inf", "1e300")]
TIMES = [f"at_s = {value}\nrtt_ms = 5" for value in ("nan", "inf", "1e400", "-inf")]


@pytest.mark.parametrize("entry", [*TIMES, *(f"at_s = 1\n{number}" for number in NUMBERS)])
def test_numbers_that_no_link_can_have_are_refused(entry):
    with pytest.raises(ConfigError, match="change 1: "):
        parse_script(f"[[change]]\n{entry}", file="s", directions=WAYS)


def test_a_script_without_end_is_refused_unread():
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_script(Path("/dev/zero"))
