"""What follows from the options of `geotrain bench step` without running anything."""

import tomllib
from pathlib import Path

import pytest

from geotrain.lab.bench.options import BenchOptions, Work, site_toml


def options(*, regions=2, boundary_bytes=1_250_000, **others) -> BenchOptions:
    """Forward 20 ms, backward 40 ms; a boundary takes 10 ms at 1 Gbit/s."""
    work = Work(
        forward_s=[0.02] * regions,
        backward_s=[0.04] * regions,
        boundary_bytes=boundary_bytes,
        num_microbatches=32,
        steps=5,
    )
    return BenchOptions(work=work, **others)


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        # Stages, one more each boundary for the machine, and the link's delay in microbatches:
        # ceil(2 x 10 / 60), ceil(2 x 60 / 60), ceil(2 x 110 / 60).
        ({"rtt_s": 0.0}, (2 + 1 + 1, 1)),
        ({"rtt_s": 0.1}, (2 + 1 + 2, 1)),
        ({"rtt_s": 0.2}, (2 + 1 + 4, 1)),
        ({"rtt_s": 0.1, "regions": 3}, (3 + 2 + 4, 2 + 1 + 2, 1)),
        # ceil(2 x (60 + 2 x 10) / 60)
        ({"rtt_s": 0.1, "jitter_s": 0.01}, (2 + 1 + 3, 1)),
        # Of 864 segments more than one in twenty microbatches meets a loss: ceil(2 x 160 / 60).
        ({"rtt_s": 0.1, "loss": 0.001}, (2 + 1 + 6, 1)),
        ({"rtt_s": 0.1, "loss": 0.00001}, (2 + 1 + 2, 1)),
    ],
)
def test_windows_that_hide_the_links(given, windows):
    assert options(window="hide", **given).windows == windows


def test_no_window_exceeds_the_microbatches():
    assert options(window="hide", rtt_s=9.0).windows == (32, 1)


def test_stages_that_take_no_time_need_no_endless_window():
    work = Work(
        forward_s=[0.0, 0.0],
        backward_s=[0.0, 0.0],
        boundary_bytes=8,
        num_microbatches=4,
        steps=2,
    )
    assert BenchOptions(work=work, window="hide").windows == (4, 1)


@pytest.mark.parametrize(("asked", "written"), [(None, "auto"), ("cubic", "cubic"), ("bbr", "bbr")])
def test_geotrains_own_lanes_are_told_what_the_kernels_have(asked, written):
    text = site_toml(
        options(congestion=asked), 0, folder=Path("x"), listen="127.0.0.1:0", dial=None
    )
    assert tomllib.loads(text)["site"]["link"]["congestion"] == written


def test_a_limit_that_is_given_replaces_the_one_that_follows():
    assert options(rtt_s=0.1).variant_limit_s == pytest.approx(20 + 5 * (5 + 8 * 2.1))
    assert options(limit_s=7.0).variant_limit_s == 7.0
