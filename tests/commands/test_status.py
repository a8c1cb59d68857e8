import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from geotrain.commands.status import (
    bit_rate,
    console,
    duration,
    fetch,
    round_trip,
    show,
    size,
    status,
)
from geotrain.config import Config, load_config
from geotrain.errors import GeotrainError

SITE = """
version = 1
[run]
id = "wiki"
global_batch = 16
regions = [{ name = "virginia", layers = "0:6" }, { name = "frankfurt", layers = "6:12" }]
[site]
name = "virginia"
socket = "rank.sock"
"""
DOCUMENT: dict[str, Any] = {
    "run_id": "wiki",
    "region": "virginia",
    "index": 0,
    "pid": 41,
    "uptime_s": 75.2,
    "state": "ready",
    "view": "00ff",
    "board": [
        {"region": "virginia", "incarnation": 1, "revision": 2, "state": "ready", "note": ""},
        {
            "region": "frankfurt",
            "state": "failed",
            "note": "",
            "error": {"region": "frankfurt", "detail": "pid 7 is gone [exit unknown]"},
        },
    ],
    "ranks": [
        {
            "rank": 0,
            "pid": 42,
            "state": "ready",
            "action": "1F3 of step 7",
            "action_age_s": 12.0,
            "step": 6,
            "report": {"loss": 2.5},
        }
    ],
    "links": {
        "frankfurt": {
            "state": "connected",
            "since_s": 70.0,
            "reason": "",
            "rtt_s": {"min": 0.1002, "p50": 0.1009, "p99": 0.104},
            "rate_bytes_per_s": {"send": 115e6, "receive": None},
            "bytes_sent": 3_210_000,
            "bytes_received": 999,
        }
    },
    "security": "plaintext",
    "egress": {
        "bytes_today": 3_210_000,
        "usd_today": 0.25,
        "usd_per_hour": 1.5,
        "usd_per_million_tokens": 0.0125,
        "limit_usd_per_day": 10.0,
    },
    "steps": {
        "total_s": {"compute": 9.0, "drain": 1.0},
        "regions_s": {
            "virginia": {"compute": 1.5, "drain": 0.3, "link_delay": 0.2, "loader": 0.001},
            "frankfurt": {"compute": 1.0, "fill": 1.0},
        },
        "verdicts": [
            {
                "kind": "compute",
                "where": "frankfurt",
                "text": "compute in frankfurt 1.5x its own since step 812",
            }
        ],
    },
    "loop_lag_ms": {"p50": 0.1, "p99": 2.0},
    "memory_rss_bytes": 50_000_000,
}


class Page(BaseHTTPRequestHandler):
    answer = b""
    asked: str = ""

    def do_GET(self) -> None:
        type(self).asked = self.path
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def config(tmp_path) -> Config:
    file = tmp_path / "site.toml"
    file.write_text(SITE)
    return load_config(file)


@pytest.fixture
def page(config) -> Iterator[type[Page]]:
    """A daemon's status page, with the note that leads to it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    note = {"status": f"127.0.0.1:{server.server_port}", "pid": 41}
    (config.path.parent / "rank.sock.json").write_text(json.dumps(note))
    Page.answer = json.dumps(DOCUMENT).encode()
    yield Page
    server.shutdown()
    thread.join()
    server.server_close()


def shown(document: dict[str, Any], *, width: int = 120) -> str:
    file = io.StringIO()
    show(document, Console(file=file, width=width))
    return file.getvalue()


BUSY = DOCUMENT | {
    "ranks": [
        DOCUMENT["ranks"][0]
        | {"pid": 4194304, "step": 123456, "action_age_s": 80_000.0}
        | {"action": "waiting for the neighbours to take the last messages"}
    ],
    "links": {
        "frankfurt-am-main-2": DOCUMENT["links"]["frankfurt"],
        "tokyo": {"state": "down", "since_s": 3.0, "reason": "connection refused: " + "why " * 30},
    },
}


@pytest.mark.parametrize("width", [80, 120])
def test_everything_a_person_asks_for_is_shown(width):
    text = " ".join(shown(DOCUMENT, width=width).split())
    for words in (
        "run wiki, region virginia: all regions ready daemon pid 41, up 1 min 15 s",
        "links not encrypted",
        "frankfurt failed pid 7 is gone [exit unknown]",
        "0 42 6 2.5000 12 s 1F3 of step 7",
        "100.2/100.9/104.0 ms",
        "virginia 2.00 s compute 75 %, drain 15 %, link delay 10 %",
        "frankfurt 2.00 s compute 50 %, fill 50 %",
        "off: compute in frankfurt 1.5x its own since step 812",
        "egress 3.21 MB today, 0.25 $ of 10 $ a day; 1.50 $/h, 0.0125 $ per million tokens",
    ):
        assert words in text


def test_lanes_are_shown_and_of_many_how_many_more_there_are():
    lane = {
        "rtt_s": 0.1012,
        "rate_bytes_per_s": {"send": 14e6, "receive": None},
        "bytes_sent": 1_000_000,
        "retransmitted_bytes": 2_000,
        "bytes_received": 50,
    }
    lanes = [lane | {"lane": number} for number in range(1, 12)]
    links = {"frankfurt": DOCUMENT["links"]["frankfurt"] | {"lanes": lanes}}
    text = " ".join(shown(DOCUMENT | {"links": links}).split())
    assert "frankfurt 8 101.2 ms 112.0 Mbit/s - 1.00 MB 2.00 kB 50 B" in text
    assert "frankfurt 9" not in text and "frankfurt and 3 more" in text
    narrow = shown(DOCUMENT | {"links": links}, width=80)
    assert (
        "  lane 8: RTT 101.2 ms, out 112.0 Mbit/s, in -\n"
        "    1.00 MB sent, 2.00 kB of it again, 50 B received\n"
        "  and 3 more\n"
    ) in narrow


def test_links_are_a_table_where_it_fits_and_lines_where_not():
    row = "frankfurt connected 1 min 10 s 100.2/100.9/104.0 ms 920.0 Mbit/s - 3.21 MB"
    assert row in " ".join(shown(DOCUMENT, width=120).split())
    assert (
        "link to frankfurt: connected for 1 min 10 s\n"
        "  RTT min/p50/p99  100.2/100.9/104.0 ms\n"
        "  out              920.0 Mbit/s, 3.21 MB sent\n"
        "  in               999 B received\n"
    ) in shown(DOCUMENT, width=80)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("document", [DOCUMENT, BUSY], ids=["quiet", "busy"])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(document, width):
    text = shown(document, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert "…" not in text
    for rank in document["ranks"]:
        assert f"{rank['pid']}" in text
    for peer in document["links"]:
        assert peer in text
    assert "100.2/100.9/104.0 ms" in text


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_pipe_and_no_color_get_no_escape_codes(monkeypatch, capsys, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich can tell
    show(DOCUMENT, console())
    assert "\x1b" not in capsys.readouterr().out


def test_stacks_are_printed_as_they_are():
    text = shown(DOCUMENT | {"stacks": {"0": 'File "train.py", line 3 in [step]\n'}})
    assert 'rank 0\nFile "train.py", line 3 in [step]\n' in text


def test_stacks_are_short_unless_all_is_asked_for(config, page, capsys):
    deep = "".join(f'  File "/x/site-packages/t.py", line {n}, in f\n' for n in range(9))
    page.answer = json.dumps(DOCUMENT | {"stacks": {"0": f"thread MainThread\n{deep}"}}).encode()
    assert status(config, stacks="short", as_json=False) == 0
    assert "thread MainThread\n  (7 frames left out)\n" in capsys.readouterr().out
    assert status(config, stacks="full", as_json=False) == 0
    assert deep in capsys.readouterr().out


def test_what_a_region_fell_to_is_told_with_its_origin():
    error = {"region": "frankfurt", "detail": "in user code: ValueError: boom"}
    board = [
        {"region": name, "state": "failed", "note": "", "error": error}
        for name in ("virginia", "frankfurt")
    ]
    rows = [" ".join(line.split()) for line in shown(DOCUMENT | {"board": board}).splitlines()]
    assert "virginia failed stopped: region frankfurt: in user code: ValueError: boom" in rows
    assert "frankfurt failed in user code: ValueError: boom" in rows


def test_what_would_not_fit_in_one_line_is_broken_where_it_reads_well():
    line = "egress 3.21 MB today, 0.25 $ of 10 $ a day; 1.50 $/h, 0.0125 $ per million tokens\n"
    assert line in shown(DOCUMENT, width=120)
    assert line.replace("; ", ";\n  ") in shown(DOCUMENT, width=80)


def test_a_daemon_at_its_start_has_little_to_show():
    link = {"state": "connecting", "reason": "connection refused", "bytes_sent": 0}
    egress = DOCUMENT["egress"] | {"usd_per_million_tokens": None, "limit_usd_per_day": None}
    text = shown(
        DOCUMENT
        | {"view": None, "ranks": [], "board": [], "links": {"tokyo": link}, "egress": egress}
        | {"steps": {"total_s": {}, "regions_s": {}, "verdicts": []}}
    )
    assert "where it went" not in text
    assert "not all regions are ready" in text
    assert "none attached" in text
    assert "link to tokyo: connection refused\n" in text
    assert "per million" not in text


def test_a_refused_congestion_control_is_told_with_what_is_in_force():
    refused = {"congestion": "cubic", "congestion_refused": "congestion control bbr cannot be had"}
    link = DOCUMENT["links"]["frankfurt"] | refused
    text = shown(DOCUMENT | {"links": {"frankfurt": link}})
    assert "link to frankfurt: congestion control bbr cannot be had; it runs cubic\n" in text


def test_json_is_the_daemons_own(config, page, capsys):
    assert status(config, stacks=None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == DOCUMENT
    assert page.asked == "/status"


def test_stacks_are_asked_for_past_any_proxy(config, page, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    fetch(config, stacks=True)
    assert page.asked == "/status?stacks=1"


def test_no_daemon_says_how_to_start_one(config):
    with pytest.raises(GeotrainError, match=r"no daemon of region virginia runs here .*--config"):
        fetch(config)


def test_a_daemon_that_was_killed_is_named_with_its_pid(config, tmp_path):
    (tmp_path / "rank.sock.json").write_text('{"status": "127.0.0.1:1", "pid": 4194304}')
    with pytest.raises(GeotrainError, match=r"pid 4194304, gone\) does not answer at 127.0.0.1:1"):
        fetch(config)


@pytest.mark.parametrize("note", ["", "{}", "[]", '{"status": "x", "pid": "y"}'])
def test_a_broken_note_is_one_line(config, tmp_path, note):
    (tmp_path / "rank.sock.json").write_text(note)
    with pytest.raises(GeotrainError, match=r"cannot read .*rank\.sock\.json"):
        fetch(config)


@pytest.mark.parametrize("answer", [b"hello", b"[1]"])
def test_something_else_on_the_port_is_one_line(config, page, answer):
    page.answer = answer
    with pytest.raises(GeotrainError, match=r"does not answer|no status"):
        fetch(config)


def test_units():
    assert [duration(s) for s in (None, 0.44, 12.9, 185, 7800)] == [
        "-",
        "0.4 s",
        "12 s",
        "3 min 5 s",
        "2 h 10 min",
    ]
    assert [size(n) for n in (None, 999, 1000, 2.5e9, 3e15)] == [
        "-",
        "999 B",
        "1.00 kB",
        "2.50 GB",
        "3000.00 TB",
    ]
    assert round_trip({"min": None, "p50": 0.1}) == "-/100.0/- ms"
    assert (round_trip({}), bit_rate(None)) == ("not known yet", "-")
    assert bit_rate(125e6) == "1000.0 Mbit/s"
