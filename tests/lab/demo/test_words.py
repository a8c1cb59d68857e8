"""Figures in few characters."""

import pytest

from geotrain.lab.demo import words


@pytest.mark.parametrize(
    ("posted", "shown"),
    [
        ("forward 0F3 of step 12", "forward 3"),
        ("backward 11B30 of step 1", "backward 30"),
        ("forward 0F3 of evaluation batch 2", "forward 3"),
        ("waiting for backward 2 of step 12", "waits: backward 2"),
        ("waiting for the decision", "waits: the decision"),
        ("vote on step 3", "vote on step 3"),
        ("", ""),
    ],
)
def test_actions_lose_what_the_rest_of_the_view_says(posted, shown):
    assert words.action(posted) == shown


def test_figures():
    assert [words.count(n) for n in (0, 950, 5840, 1.2e6, 3e9)] == [
        *("0", "950", "5.84 k", "1.20 M", "3.00 G")
    ]
    assert [words.size(n) for n in (12, 4200, 4.2e6, 7e9, 2e12)] == [
        *("12 B", "4.2 kB", "4.2 MB", "7.0 GB", "2.0 TB")
    ]
    assert [words.dollars(usd) for usd in (0, 0.00042, 0.5, 12.345)] == [
        *("-", "0.00042", "0.50000", "12.35")
    ]
    assert (words.mbit(12.5e6), words.mbit(None)) == ("100", "-")


@pytest.mark.parametrize(
    ("payload", "wire", "text"),
    [(8e6, 6e6, "2.0 MB 25%"), (8e6, 8.1e6, "-"), (0, 5e3, "-"), (0, 0, "-")],
)
def test_saved_is_what_coding_kept_off_the_wire(payload, wire, text):
    assert words.saved(payload, wire) == text
    assert words.saved_share(payload, wire) == text.rpartition(" ")[2]


def test_names_are_cut_to_their_column():
    assert words.shortened("virginia", 10) == "virginia"
    assert words.shortened("sao-paulo-east", 10) == "sao-paul.."


def test_the_largest_part_of_a_step_besides_computing():
    assert words.largest_wait({"compute": 0.8, "link_delay": 0.15, "drain": 0.05}) == ("delay 15%")
    assert words.largest_wait({"compute": 1.0, "drain": 0.001}) == "-"
    assert words.largest_wait({"compute": 1.0}) == words.largest_wait({}) == "-"
