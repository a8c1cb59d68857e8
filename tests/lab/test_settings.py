"""Link settings, and which links there are."""

import pytest

from geotrain.errors import ConfigError
from geotrain.lab.settings import (
    LinkSettings,
    Selection,
    check_sites,
    directions_of,
    in_base_units,
    joined,
    path_between,
)

SITES = ["a", "b", "c"]
LINE = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]


def test_a_round_trip_is_twice_the_delay():
    assert LinkSettings.from_round_trip(0.1).delay_s == 0.05
    assert LinkSettings().changed({"rtt_s": 0.2, "loss": 0.01}) == LinkSettings(
        delay_s=0.1, loss=0.01
    )


@pytest.mark.parametrize(
    "wrong",
    [
        *({"delay_s": -1.0}, {"loss": 1.5}, {"rate_bytes_per_s": 0.0}, {"queue_s": -0.1}),
        *({"queue_bytes": 0}, {"idle_drop_s": 0.0}, {"jitter_s": -1.0}),
    ],
    ids=str,
)
def test_impossible_settings_name_the_field(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"link setting {name} must"):
        LinkSettings(**wrong)


def test_an_unknown_setting_is_named():
    with pytest.raises(ConfigError, match="no setting called speed"):
        LinkSettings().changed({"speed": 1})


def test_what_people_write_in_base_units():
    assert in_base_units({"rtt_ms": 100, "mbit": 8, "queue_kib": 2, "cut": True}) == {
        "rtt_s": pytest.approx(0.1),
        "rate_bytes_per_s": pytest.approx(1e6),
        "queue_bytes": 2048,
        "cut": True,
    }
    assert in_base_units({"mbit": 0, "idle_drop_s": 0}) == {
        "rate_bytes_per_s": None,
        "idle_drop_s": None,
    }


def test_settings_read_well():
    settings = LinkSettings(delay_s=0.05, rate_bytes_per_s=125e6, loss=0.001, cut=True)
    assert str(settings) == "50 ms one way, 1000 Mbit/s, loss 0.1 %, queue 200 ms, CUT"


def test_topologies():
    assert directions_of(SITES, "line") == LINE
    assert len(directions_of(SITES, "mesh")) == 6
    assert path_between("a", "c", SITES, "line") == [("a", "b"), ("b", "c")]
    assert path_between("c", "a", SITES, "line") == [("c", "b"), ("b", "a")]
    assert path_between("c", "a", SITES, "mesh") == [("c", "a")]


@pytest.mark.parametrize(
    ("selection", "ways"),
    [
        (Selection(), LINE),
        (Selection(source="b"), [("b", "a"), ("b", "c")]),
        (Selection(source="c", target="b"), [("c", "b")]),
        (Selection(source="c", target="b", both=True), [("b", "c"), ("c", "b")]),
    ],
    ids=str,
)
def test_a_selection_picks_directions(selection, ways):
    assert selection.pick(LINE) == ways


def test_a_selection_that_fits_no_link_says_which_there_are():
    with pytest.raises(ConfigError, match=r"no link a to c; there are: a to b, b to a"):
        Selection(source="a", target="c").pick(LINE)


@pytest.mark.parametrize("sites", [["a"], ["a", "a"], ["a", "b/c"], ["a", ""]], ids=str)
def test_impossible_sites_are_refused(sites):
    with pytest.raises(ConfigError):
        check_sites(sites)


def test_links_in_a_row_are_like_one():
    near = LinkSettings(delay_s=0.01, rate_bytes_per_s=10.0, loss=0.5, jitter_s=0.003)
    far = LinkSettings(delay_s=0.02, rate_bytes_per_s=5.0, loss=0.5, jitter_s=0.004, cut=True)
    assert joined([near, far]) == LinkSettings(
        delay_s=0.03, rate_bytes_per_s=5.0, loss=0.75, jitter_s=0.005, cut=True
    )
    assert joined([near]) == near
