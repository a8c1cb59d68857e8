"""The figures that `geotrain bench step` prints."""

import json

import pytest

from geotrain.lab.bench.options import BenchOptions, Work
from geotrain.lab.bench.peers import Peer
from geotrain.lab.bench.report import report, table

OPTIONS = BenchOptions(
    work=Work(
        forward_s=[0.02, 0.02],
        backward_s=[0.04, 0.04],
        boundary_bytes=1_250_000,
        num_microbatches=32,
        steps=3,
    ),
    window=(8, 1),
)
STEP = {"step_s": 2.5, "windows": [8, 1], "num_microbatches": 32, "attribution_s": {"wait": 0.2}}
HUNG = Peer(step_s=None, note="none within 60 s (3 steps asked for)")


def figures(peers=None, *, step_s=2.4, num_steps=3):
    return report(
        OPTIONS,
        step_s=step_s,
        steps=[STEP] * num_steps,
        emulator="netns",
        congestion={"sites": "cubic", "geotrain": "bbr"},
        load=0.5,
        peers=peers,
    )


def test_a_step_against_the_ideal():
    result = figures()
    assert result["ideal_s"] == pytest.approx(31 * 0.06 + 0.12 + 0.12)
    assert result["lower_bound_s"] == pytest.approx(0.02 + 0.1 + 0.01 + 32 * 0.06)
    assert result["link_s"] == pytest.approx(32 * 0.01)
    assert result["ratio"] == pytest.approx(2.4 / 2.1)
    assert result["bubble"] == pytest.approx(1 - 1.92 / 2.4)
    assert (result["windows"], result["num_microbatches"]) == ([8, 1], 32)
    assert (result["peer_step_s"], result["speedup"], result["speedup_stock"]) == ({}, None, None)
    json.dumps(result)


def test_speedups_are_against_the_best_of_all_and_the_best_of_stock():
    peers = {"1f1b": 6.0, "gpipe": 9.0, "csv4": 3.2, "csv5": 3.0}
    result = figures({name: Peer(step_s=s, note="") for name, s in peers.items()})
    assert result["peer_step_s"] == {"torch_1f1b": 6.0, "torch_gpipe": 9.0, "torch_csv": 3.0}
    assert result["torch_csv_widths"] == {"4": 3.2, "5": 3.0}
    assert result["speedup"] == pytest.approx(1.25)
    assert result["speedup_stock"] == pytest.approx(2.5)


def test_what_did_not_end_has_no_time_and_says_so():
    result = figures({"1f1b": HUNG, "gpipe": HUNG, "csv4": HUNG})
    assert result["peer_step_s"] == dict.fromkeys(("torch_1f1b", "torch_gpipe", "torch_csv"))
    assert (result["speedup"], result["speedup_stock"]) == (None, None)
    assert result["peer_notes"]["torch_1f1b"] == HUNG.note
    assert "torch_1f1b      none s  none within 60 s" in table(result)
    json.dumps(result)


def test_one_that_ended_is_compared_with():
    result = figures({"1f1b": HUNG, "gpipe": Peer(step_s=12.0, note=""), "csv4": HUNG})
    assert result["speedup"] == result["speedup_stock"] == pytest.approx(5.0)


def test_why_there_is_no_comparison_is_told():
    result = figures("no comparison with torch: relays")
    assert result["peer_step_s"] == {}
    assert "no comparison with torch: relays" in table(result).splitlines()


def test_fewer_steps_than_asked_for_are_told():
    result = figures(num_steps=2)
    assert (result["num_steps"], result["num_steps_asked"]) == (2, 3)
    assert "1.143 x ideal, 2 of 3 steps in time\n" in table(result)
    assert "1.143 x ideal\n" in table(figures())


def test_the_table_names_the_congestion_controls_and_the_machines_load():
    text = table(figures())
    assert "congestion control cubic, geotrain's own bbr" in text
    assert "geotrain       2.400 s  1.143 x ideal" in text
    assert "load 0.50" in text
