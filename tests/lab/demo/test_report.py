"""What the demo prints."""

import json
from pathlib import Path

import pytest

from geotrain.lab.demo.changes import Change
from geotrain.lab.demo.comparison import compare
from geotrain.lab.demo.report import Report, rtt_of_links
from tests.lab.demo.running import running, step_record

RTT_MS = {"virginia-frankfurt": {"min": 100.2, "p50": 101.0}}
JSON_KEYS = {"event", "step", "loss", "grad_norm", "num_tokens", "step_s"}
JSON_KEYS |= {"num_microbatches", "windows", "wan_bytes"}


def report_of(regions=2, **options):
    state = running(regions, **options)
    return Report(state=state, num_cpus=2), compare(state, single_process_step_s=0.5)


def test_json_lines_have_the_documented_keys():
    report, comparison = report_of(json=True, mbit=80.0)
    assert report.opening() == []
    record = step_record(0, 3, options=report.state.options)
    (text,) = report.step(record)
    assert json.loads(text) == {key: record[key] for key in JSON_KEYS}
    assert report.starting() == []
    assert report.change(Change(at_s=1.0, what="x")) == []
    assert report.baseline_begins(4) == []
    (text,) = report.summary(comparison, wall_s=12.3456, rtt_ms=RTT_MS, difference=None)
    assert json.loads(text) == {
        "event": "summary",
        "regions": 2,
        "steps": 3,
        "final_loss": 4.5,
        "wall_s": 12.346,
        "rtt_ms": RTT_MS,
        "step_s": 1.0,
        "ideal_s": comparison.ideal_s,
        "lower_bound_s": comparison.lower_bound_s,
        "single_process_step_s": 0.5,
        "attribution_s": {region.name: region.spent_s for region in report.state.regions},
    }
    assert report.state.regions[1].spent_s["drain"] == pytest.approx(1.2)  # steps 2 and 3
    report, comparison = report_of(json=True, verify=True)
    (text,) = report.summary(comparison, wall_s=1.0, rtt_ms=RTT_MS, difference=0.0)
    assert json.loads(text)["max_abs_param_diff"] == 0.0


def test_what_is_not_known_is_null():
    state = running(2, steps=1, json=True)
    comparison = compare(state, single_process_step_s=None)
    report = Report(state=state, num_cpus=2)
    (text,) = report.summary(comparison, wall_s=1.0, rtt_ms={}, difference=None)
    summary = json.loads(text)
    assert summary["ideal_s"] is summary["lower_bound_s"] is None
    assert summary["single_process_step_s"] is None


def test_people_read_one_line_a_step_and_what_changed():
    report, _ = report_of()
    assert report.step(step_record(0, 3, options=report.state.options)) == [
        "step  3/30  loss 4.5000   1.000 s    4.10 k tokens/s  WAN    4.20 MB"
    ]
    change = Change(at_s=13.34, what="every link: round trip 250 ms", why="a detour")
    assert report.change(change) == ["at 12.3 s  every link: round trip 250 ms (a detour)"]


def test_people_read_what_is_started_and_what_emulates_the_links():
    report, _ = report_of()
    report.state.emulator = "relay: relays were asked for"
    assert report.opening()[1].endswith("(emulated by relay: relays were asked for)")
    assert report.starting() == [
        "starting 2 daemons and 2 training processes, which import torch ..."
    ]
    assert report_of(1)[0].starting() == ["starting a training process, which imports torch ..."]


def test_the_summary_says_what_the_delay_costs_and_what_the_step_is_measured_against():
    report, comparison = report_of(mbit=80.0, steps=5, verify=True)
    lines = report.summary(comparison, wall_s=12.0, rtt_ms=RTT_MS, difference=0.0)
    assert lines == [
        "",
        "2 regions trained one model: 5 steps in 12.0 s, loss 5.500 -> 3.500",
        "round trip virginia-frankfurt: min 100.2, p50 101.0 ms",
        "one round trip of every link is 0.100 s, 10% of a step;",
        "by calculation, waiting for it at each microbatch would add 0.4 s",
        "",
        "seconds a step",
        "  measured      1.000  median after the first step",
        "  T_ideal       0.460  each link's delay paid once a step  measured is 2.17 x",
        "  lower bound   0.390  no synchronous step is below        measured is 2.56 x",
        "  one process   0.500  plain torch, alone, one thread      measured is 2.00 x",
        "",
        "T_ideal and the bound: with the forwards and backwards as they took in this run,",
        "in which all regions shared this machine's 2 CPUs",
        "",
        "where the time of a step went",
        "  virginia   drain 60 %, compute 24 %, fill 16 %",
        "  frankfurt  drain 60 %, compute 24 %, fill 16 %",
        "parameters: largest difference 0.0: bit for bit what one plain torch process computes",
    ]


def test_the_summary_says_what_its_figures_do_not_cover():
    report, comparison = report_of(mbit=8.0, script=Path("weather.toml"))
    text = "\n".join(report.summary(comparison, wall_s=1.0, rtt_ms={}, difference=None))
    assert "the link sets the\npace, and T_ideal is out of reach" in text
    assert "the script changed the links" in text
    assert "parameters" not in text
    report, comparison = report_of(steps=1)
    text = "\n".join(report.summary(comparison, wall_s=1.0, rtt_ms={}, difference=None))
    assert "T_ideal           -  each link" in text
    assert "as they took" not in text


def test_a_difference_is_not_called_equal():
    report, comparison = report_of(1, verify=True)
    for difference in (1e-9, None):
        lines = report.summary(comparison, wall_s=1.0, rtt_ms={}, difference=difference)
        assert "NOT what one plain torch process computes" in lines[-1]


def test_round_trips_come_from_the_dialling_side():
    status = {"links": {"frankfurt": {"rtt_s": {"min": 0.1, "p50": 0.1012, "p99": None}}}}
    assert rtt_of_links(["virginia", "frankfurt"], [status, None]) == {
        "virginia-frankfurt": {"min": 100.0, "p50": 101.2}
    }
    assert rtt_of_links(["a", "b"], [None, None]) == {"a-b": {}}
