"""Real daemons as processes: what they carry, what they survive, what they say."""

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geotrain.errors import AttachError
from geotrain.transport.attachment import Attachment
from geotrain.transport.attachment_incoming import Received
from geotrain.transport.messages import BACKWARD, FORWARD, stream_id
from tests.daemon.daemons import STOP_LIMIT_S, Daemons, daemons
from tests.transport.local_line import TIMEOUT_S, open_views, wait_for_state

QUICK = """
arena_mib = 8
[site.liveness]
silent_s = 2.5
wait_s = 3.0
[site.link]
ping_interval_s = 0.5
"""

SILENT = re.compile(r"silent for (2\.5|5|10|20|40) s in user code")

RANK = """
import sys, time
from pathlib import Path
from tests.daemon.daemons import attach
attachment = attach(Path(sys.argv[1]))
attachment.action = "in user code"
attachment.report({"step": 7, "num_tokens": 1000})
attachment.ready({})
time.sleep(60)
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Daemons]:
    with daemons(tmp_path, 2, site=QUICK) as running:
        yield running


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Daemons]:
    with daemons(tmp_path, 2, site=QUICK, tls=True) as running:
        yield running


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Daemons]:
    """For what takes as long as the machine is busy."""
    with daemons(tmp_path, 2, site=QUICK.replace("wait_s = 3", "wait_s = 60")) as running:
        yield running


@contextlib.contextmanager
def rank_process(running: Daemons, name: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", RANK, str(running.config_path(name))]
    with subprocess.Popen(argv) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(STOP_LIMIT_S)


def send(attachment: Attachment, stream: int, payload: bytes) -> None:
    out = attachment.out(stream)
    assert attachment.wait(lambda: out.fits(len(payload)), timeout_s=TIMEOUT_S)
    start, slot = out.reserve(len(payload))
    slot[:] = payload
    hints = ((0, len(payload)),)
    out.send(
        kind="forward",
        step=0,
        microbatch=0,
        start=start,
        payload_bytes=len(payload),
        hints=hints,
    )


def receive(attachment: Attachment, stream: int) -> Received:
    incoming = attachment.incoming(stream)
    assert attachment.wait(lambda: incoming.pending() > 0, timeout_s=TIMEOUT_S)
    received = incoming.take()
    assert received is not None
    return received


def exchange(a: Attachment, b: Attachment, boundary: int = 0) -> None:
    """Messages of many sizes both ways between two neighbours, all bit-equal."""
    rng = np.random.default_rng(0)
    pairs = [
        (a, b, stream_id(boundary, FORWARD)),
        (b, a, stream_id(boundary, BACKWARD)),
    ]
    for size in (1, 4096, 100_000, 1 << 20, a.out(boundary * 2).max_part_bytes):
        noise = rng.integers(0, 256, size, np.uint8).tobytes()
        for payload in (noise, bytes(size)):
            for sender, _, stream in pairs:
                send(sender, stream, payload)
            for _, taker, stream in pairs:
                received = receive(taker, stream)
                assert bytes(received.payload) == payload
                received.release()
    for sender, _, stream in pairs:
        out = sender.out(stream)
        assert sender.wait(lambda o=out: o.unacknowledged == 0, timeout_s=TIMEOUT_S)
        # The zeros were coded, the noise went as it is.
        assert out.wire_bytes < 1.6 * sum((1, 4096, 100_000, 1 << 20, out.max_part_bytes))


def test_the_daemon_never_imports_torch() -> None:
    code = "import sys, geotrain.daemon.main; print([m for m in sys.modules if m == 'torch'])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert output.stdout.strip() == b"[]"


def test_three_regions_exchange_messages_over_both_boundaries(tmp_path: Path) -> None:
    with daemons(tmp_path, 3, site=QUICK) as running:
        ranks = [running.attach(name) for name in running.names]
        open_views(*ranks)
        exchange(ranks[0], ranks[1], boundary=0)
        exchange(ranks[1], ranks[2], boundary=1)
        for rank in ranks:
            rank.close()
        status = running.wait_for("a", lambda s: s["board"][2]["state"] == "left")
        assert [entry["note"] for entry in status["board"]] == ["closed"] * 3


def test_one_region_needs_no_link(tmp_path: Path) -> None:
    with daemons(tmp_path, 1, site=QUICK) as running:
        with contextlib.closing(running.attach("a")) as a:
            open_views(a)
            assert running.status("a")["links"] == {}


def test_the_status_page_tells_all(pair: Daemons) -> None:
    with rank_process(pair, "a") as process:
        status = pair.wait_for("a", lambda s: s["ranks"] and s["ranks"][0]["state"] == "ready")
        (rank,) = status["ranks"]
        assert (rank["rank"], rank["pid"], rank["action"]) == (0, process.pid, "in user code")
        assert (rank["step"], rank["report"]) == (7, {"step": 7, "num_tokens": 1000})
        assert (status["region"], status["index"], status["state"]) == ("a", 0, "ready")
        assert [entry["region"] for entry in status["board"]] == ["a", "b"]
        assert set(status["loop_lag_ms"]) >= {"p50", "p99"}
        assert status["memory_rss_bytes"] > 0
        stacks = pair.status("a", "?stacks=1")["stacks"]
        assert "time.sleep(60)" in stacks["0"] or "<string>" in stacks["0"]
    assert pair.get("a", "/healthz") == "ok\n"
    pair.wait_for("b", lambda s: s["links"]["a"]["state"] == "connected")
    metrics = pair.get("b", "/metrics")
    assert 'geotrain_link_up{peer="a"} 1.0' in metrics
    assert 'geotrain_region_state{region="a"' in metrics
    with pytest.raises(urllib.error.HTTPError, match="404"):
        pair.get("a", "/nothing")


def test_a_stopped_process_is_named_everywhere_and_forgiven(pair: Daemons) -> None:
    with rank_process(pair, "a") as process:
        pair.wait_for("b", lambda s: s["board"][0]["state"] == "ready")
        process.send_signal(signal.SIGSTOP)
        for name in pair.names:
            # It is named again after twice the time, so nobody is sure to see the first note.
            pair.wait_for(name, lambda s: SILENT.match(s["board"][0]["note"]))
        assert "stopped" in pair.status("a", "?stacks=1")["stacks"]["0"]
        process.send_signal(signal.SIGCONT)
        pair.wait_for("b", lambda s: s["board"][0]["note"] == "")
    assert re.search(f"region a: ready: {SILENT.pattern}", pair.log("b"))


def test_after_a_killed_rank_the_next_one_forms_a_new_view(pair: Daemons) -> None:
    with contextlib.closing(pair.attach("b")) as b:
        with rank_process(pair, "a") as process:
            wait_for_state(b, "a", "ready")
            old = open_views(b)
            process.kill()
            error = wait_for_state(b, "a", "failed").error
        assert error is not None
        assert (error["region"], error["kind"]) == ("a", "lost")
        assert f"pid {process.pid}" in error["detail"]
        with contextlib.closing(pair.attach("a")) as a:
            wait_for_state(b, "a", "attached")
            assert open_views(a, b) != old
            exchange(a, b)


def test_sigterm_ends_a_daemon_in_order_with_everybody_told(pair: Daemons) -> None:
    a, b = pair.attach("a"), pair.attach("b")
    open_views(a, b)
    assert pair.stop("a") == 0
    for rank in (a, b):
        error = wait_for_state(rank, "a", "failed").error
        assert error is not None
        assert error["kind"] == "daemon"
        assert "was ended (SIGTERM); start it again" in error["detail"]
    with pytest.raises(AttachError, match="is gone"):
        a.wait(lambda: False, timeout_s=TIMEOUT_S)
    pair.wait_for("b", lambda s: s["links"]["a"]["state"] != "connected")
    assert "link to a: closed by the other side: its daemon ends: ended by SIGTERM" in pair.log("b")
    assert [path.name for path in pair.socket_path("a").parent.glob("a.sock*")] == []
    a.close()
    b.close()


def test_a_killed_daemon_can_be_started_again(patient: Daemons) -> None:
    pair = patient
    a, b = pair.attach("a"), pair.attach("b")
    open_views(a, b)
    pair.stop("a", signal.SIGKILL)
    with pytest.raises(AttachError, match="start it again, then this process"):
        a.wait(lambda: False, timeout_s=TIMEOUT_S)
    a.close()
    pair.start("a")
    with contextlib.closing(pair.attach("a")) as again:
        assert again.incarnation > a.incarnation
        assert b.wait(lambda: b.board()["a"].incarnation == again.incarnation, timeout_s=TIMEOUT_S)
        open_views(again, b)
        exchange(again, b)
    b.close()


def test_a_daemon_killed_while_a_rank_attaches_costs_time_only(patient: Daemons) -> None:
    patient.stop("a", signal.SIGKILL)
    path = patient.socket_path("a")
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with ThreadPoolExecutor(1) as pool:
            attaching = pool.submit(patient.attach, "a")
            listener.settimeout(TIMEOUT_S)
            listener.accept()[0].close()  # it dies before it answers
            listener.close()
            path.unlink()
            patient.start("a")
            with contextlib.closing(attaching.result(TIMEOUT_S)) as attachment:
                assert attachment.region == "a"


def test_a_link_that_stays_down_longer_than_wait_s_is_one_named_error(pair: Daemons) -> None:
    a, b = pair.attach("a"), pair.attach("b")
    open_views(a, b)
    pair.stop("b", signal.SIGKILL)
    error = wait_for_state(a, "a", "failed").error
    assert error is not None
    assert error["kind"] == "link"
    assert re.search(r"the link to region b is down for \d+ s", error["detail"])
    assert "liveness.wait_s" in error["detail"]
    a.close()
    b.close()


def test_at_the_daily_limit_of_dollars_ranks_are_asked_to_stop(tmp_path: Path) -> None:
    site = "arena_mib = 8\n[site.limits]\negress_usd_per_day = 0.001"
    running = Daemons(tmp_path, 2, site=site)
    try:
        for name in running.names:
            path = running.config_path(name)
            text = path.read_text().replace("url =", "egress_usd_per_gb = 1.0\nurl =")
            path.write_text(text)
            running.start(name)
        a, b = running.attach("a"), running.attach("b")
        open_views(a, b)
        a.report({"step": 1, "num_tokens": 500.0})
        for _ in range(2):
            send(a, FORWARD, np.random.default_rng(0).bytes(1 << 20))
            receive(b, FORWARD).release()
        assert a.wait(lambda: a.stop_reason is not None, timeout_s=TIMEOUT_S)
        assert "limits.egress_usd_per_day = 0.001" in str(a.stop_reason)
        assert b.stop_reason is None
        # The limit is reached by the first message; the second is counted a second later.
        egress = running.wait_for("a", lambda s: s["egress"]["bytes_today"] > 2 << 20)["egress"]
        assert egress["usd_per_million_tokens"] == pytest.approx(4.2, rel=0.05)
        a.close()
        b.close()
    finally:
        running.close()


# What goes wrong at the start is one line.


def run_daemon(running: Daemons, name: str) -> tuple[int, str]:
    argv = [sys.executable, "-m", "geotrain", "daemon", "--config", str(running.config_path(name))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stderr


def test_a_second_daemon_for_one_place_refuses_to_start(pair: Daemons) -> None:
    status, text = run_daemon(pair, "a")
    assert status == 1
    assert text.count("\n") == 1
    assert f"another daemon already serves this region (pid {pair.processes['a'].pid}" in text
    assert pair.get("a", "/healthz") == "ok\n"


@pytest.mark.parametrize("key", ["listen", "status"])
def test_a_port_in_use_is_one_line_with_the_remedy(tmp_path: Path, key: str) -> None:
    running = Daemons(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        lines = running.config_path("a").read_text().splitlines()
        text = "\n".join(f"{key} = '{address}'" if key in x else x for x in lines)
        running.config_path("a").write_text(text)
        status, text = run_daemon(running, "a")
    assert status == 1
    assert text.count("\n") == 1
    assert f"{address}: address already in use; stop what uses the port" in text
    assert f"change site.{key}" in text
    assert list(tmp_path.glob("a.sock*")) == []


def test_regions_with_different_runs_refuse_each_other_and_name_the_keys(tmp_path: Path) -> None:
    running = Daemons(tmp_path, 2, site=QUICK)
    try:
        path = running.config_path("b")
        path.write_text(path.read_text().replace("global_batch = 8", "global_batch = 16"))
        for name in running.names:
            running.start(name)
        for name in running.names:
            peer = "b" if name == "a" else "a"
            status = running.wait_for(
                name, lambda s, peer=peer: s["links"][peer]["state"] == "refused"
            )
            reason = status["links"][peer]["reason"]
            assert "run.global_batch" in reason
            assert "8" in reason
            assert "16" in reason
            assert "run.global_batch" in running.log(name)
    finally:
        running.close()


def installed_as(folder: Path, version: str) -> dict[str, str]:
    """An environment in which this very code is installed under another version."""
    metadata = folder / f"geotrain-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: geotrain\nVersion: {version}\n")
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {"PYTHONPATH": os.pathsep.join([str(folder), *before])}


def test_another_version_is_refused_by_daemons_and_by_ranks_with_the_remedy(tmp_path: Path) -> None:
    running = Daemons(tmp_path, 2, site=QUICK)
    own = importlib.metadata.version("geotrain")
    try:
        running.start("a")
        running.start("b", env=installed_as(tmp_path / "other", "99.1"))
        for name in running.names:
            peer = "b" if name == "a" else "a"
            status = running.wait_for(
                name, lambda s, peer=peer: s["links"][peer]["state"] == "refused"
            )
            reason = status["links"][peer]["reason"]
            assert f"'{own}' in a" in reason
            assert "'99.1' in b" in reason
            assert reason.endswith("; install the same version of geotrain in both")
            assert reason in running.log(name)
        for name, versions in (("b", ("99.1", own)), ("a", (own, "99.1"))):
            daemons_own, ranks = versions
            with pytest.raises(AttachError) as refused:
                running.attach(name, version=ranks)
            assert f"the daemon runs geotrain {daemons_own} " in str(refused.value)
            assert f"this process {ranks} " in str(refused.value)
            assert "install the same version in both" in str(refused.value)
    finally:
        running.close()


def test_the_note_beside_the_socket_has_the_real_addresses(pair: Daemons) -> None:
    path = pair.socket_path("a").with_name("a.sock.json")
    note: dict[str, Any] = json.loads(path.read_text())
    assert note["pid"] == pair.processes["a"].pid
    assert not note["status"].endswith(":0")
    assert pair.socket_path("a").stat().st_mode & 0o777 == 0o600


def test_links_with_tls_carry_the_same_and_say_so(secured):
    with contextlib.closing(secured.attach("a")) as a, contextlib.closing(secured.attach("b")) as b:
        open_views(a, b)
        exchange(a, b)
        for name, peer in (("a", "b"), ("b", "a")):
            status = secured.status(name)
            assert status["security"] == "tls"
            assert status["links"][peer]["tls"].startswith("TLSv1.3, TLS_")
            assert "links are encrypted: TLS 1.3, own certificate until 2" in secured.log(name)
            assert "site.tls: the certificate ends in" in secured.log(name)


def test_links_without_tls_say_so(pair):
    with contextlib.closing(pair.attach("a")) as a, contextlib.closing(pair.attach("b")) as b:
        open_views(a, b)
        for name, peer in (("a", "b"), ("b", "a")):
            status = pair.status(name)
            assert (status["security"], status["links"][peer]["tls"]) == ("plaintext", "no")
            assert "links are not encrypted: no [site.tls] here" in pair.log(name)


def test_a_daemon_whose_key_is_another_ones_does_not_start(secured, tmp_path):
    secured.stop("a")
    (tmp_path / "a.key").write_bytes((tmp_path / "b.key").read_bytes())
    with pytest.raises(AssertionError, match=r"site\.tls\.key: does not belong to .*a\.pem"):
        secured.start("a")
    assert secured.processes.pop("a").wait(STOP_LIMIT_S) == 2
