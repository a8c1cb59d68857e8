"""What the demo prints."""

import json

from geotrain.lab.demo.options import Options
from geotrain.lab.demo.report import Report, rtt_of_links

LINE = {
    "event": "step",
    "step": 0,
    "loss": 5.5,
    "grad_norm": 2.0,
    "num_tokens": 4096,
    "step_s": 0.5,
    "num_microbatches": 8,
    "windows": [8, 1],
    "wan_bytes": 4_200_000,
    "attribution_s": {},
}
RTT_MS = {"virginia-frankfurt": {"min": 100.2, "p50": 101.0}}


def test_json_lines_have_the_documented_keys():
    report = Report(options=Options(json=True, steps=1))
    assert report.opening() == []
    (text,) = report.step(LINE)
    expected = {key: value for key, value in LINE.items() if key != "attribution_s"}
    assert json.loads(text) == expected
    (text,) = report.summary(wall_s=12.3456, rtt_ms=RTT_MS, verified=False, difference=None)
    assert json.loads(text) == {
        "event": "summary",
        "regions": 2,
        "steps": 1,
        "final_loss": 5.5,
        "wall_s": 12.346,
        "rtt_ms": RTT_MS,
    }
    (text,) = report.summary(wall_s=1.0, rtt_ms=RTT_MS, verified=True, difference=0.0)
    assert json.loads(text)["max_abs_param_diff"] == 0.0


def test_people_read_one_line_a_step():
    report = Report(options=Options(steps=30))
    assert report.step(LINE) == [
        "step  1/30  loss 5.5000   0.500 s    8.19 k tokens/s  WAN    4.20 MB"
    ]


def test_the_summary_says_what_the_delay_costs():
    report = Report(options=Options(steps=2, microbatches=4))
    report.step(LINE)
    report.step(LINE | {"loss": 4.5})
    lines = report.summary(wall_s=12.0, rtt_ms=RTT_MS, verified=True, difference=0.0)
    assert lines[1:] == [
        "2 regions trained one model: 2 steps in 12.0 s, loss 5.500 -> 4.500, "
        "0.500 s a step (median)",
        "round trip virginia-frankfurt: min 100.2, p50 101.0 ms",
        "one round trip of every link is 0.100 s, 20% of a step; "
        "waiting for it at each microbatch would add 0.4 s",
        "parameters: largest difference 0.0: bit for bit what one plain torch process computes",
    ]


def test_a_difference_is_not_called_equal():
    report = Report(options=Options(regions=1))
    report.step(LINE)
    for difference in (1e-9, None):
        lines = report.summary(wall_s=1.0, rtt_ms={}, verified=True, difference=difference)
        assert "NOT what one plain torch process computes" in lines[-1]


def test_round_trips_come_from_the_dialling_side():
    status = {"links": {"frankfurt": {"rtt_s": {"min": 0.1, "p50": 0.1012, "p99": None}}}}
    assert rtt_of_links(["virginia", "frankfurt"], [status, None]) == {
        "virginia-frankfurt": {"min": 100.0, "p50": 101.2}
    }
    assert rtt_of_links(["a", "b"], [None, None]) == {"a-b": {}}
