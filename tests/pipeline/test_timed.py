"""Traces print, parse back, and open in a trace viewer."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.pipeline.schedule import Action
from geotrain.pipeline.timed import Timed, Trace, chrome_events, timed_runs

TEXT = """\
0F0 0.000000 0.020000
0SEND_F0 0.020000 0.028389
1RECV_F0 0.078389 0.078389
1F0 0.078389 0.098389
1B0 0.098389 0.138389
"""

ACTIONS = st.builds(
    Action,
    stage=st.integers(0, 5),
    kind=st.sampled_from(["F", "B", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]),
    microbatch=st.integers(0, 99),
)
MICROSECONDS = st.integers(0, 10**9)


def test_a_trace_prints_and_parses_back():
    assert str(Trace.parse(TEXT)) == TEXT


@given(st.lists(st.builds(lambda a, b, e: (a, b, e), ACTIONS, MICROSECONDS, MICROSECONDS)))
def test_so_does_any_other(drawn):
    trace = Trace.of(
        Timed(action=action, begin_s=begin / 1e6, end_s=end / 1e6) for action, begin, end in drawn
    )
    assert Trace.parse(str(trace)) == trace


def test_comments_and_blank_lines_are_skipped():
    assert Trace.parse("# stage 0\n\n0F0 0 1\n") == Trace.parse("0F0 0 1")


@pytest.mark.parametrize("line", ["0F0", "0F0 0", "0F0 a b", "0Q0 0 1", "0F0 0 1 2"])
def test_a_line_that_is_no_timed_action_is_refused(line):
    with pytest.raises(ValueError, match=r"not an action|could not convert"):
        Trace.parse(line)


def test_what_a_region_ran_makes_a_trace():
    runs = [SimpleNamespace(kind="F", microbatch=0, begin_s=0.0, end_s=1.0)]
    assert str(Trace.of(timed_runs(2, runs))) == "2F0 0.000000 1.000000\n"


def test_rows_are_each_stage_in_order():
    trace = Trace.parse(TEXT).computing()
    assert [" ".join(map(str, row)) for row in trace.rows()] == ["0F0", "1F0 1B0"]
    assert (trace.num_stages, trace.end_s) == (2, 0.138389)
    assert (Trace(()).num_stages, Trace(()).end_s, Trace(()).rows()) == (0, 0.0, [])


def test_chrome_events_are_json_with_a_process_a_region_and_microseconds():
    written = json.loads(json.dumps(chrome_events(Trace.parse(TEXT), ["virginia", "frankfurt"])))
    named = [e for e in written["traceEvents"] if e["ph"] == "M"]
    assert {(e["pid"], e["args"]["name"]) for e in named if e["name"] == "process_name"} == {
        (0, "0: virginia"),
        (1, "1: frankfurt"),
    }
    events = {e["name"]: e for e in written["traceEvents"] if e["ph"] == "X"}
    assert list(events) == ["0F0", "0SEND_F0", "1RECV_F0", "1F0", "1B0"]
    assert events["1F0"]["ts"] == pytest.approx(78389.0)
    assert events["1F0"]["dur"] == pytest.approx(20000.0)
    assert [events[name]["tid"] for name in ("1F0", "0SEND_F0", "1RECV_F0")] == [0, 1, 2]
