"""The lab in real network namespaces; needs root and /dev/net/tun, and says so where it has not."""

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geotrain.errors import ConfigError
from geotrain.lab.emulator.netns import obstacle
from geotrain.lab.emulator.sites import LabFailedError
from geotrain.lab.selfcheck import ask, self_check, serving
from geotrain.lab.settings import LinkSettings
from geotrain.lab.wan import Wan, find_wan, open_wan
from tests.lab.emulator.remains import MARK, Before, left_behind, look
from tests.lab.eventually import eventually

LIMIT_S = 30.0
OWNER = Path(__file__).with_name("owner.py")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
SITES = ("a", "b")

pytestmark = [pytest.mark.timeout(90)]


@pytest.fixture(autouse=True, scope="module")
def permitted() -> None:
    reason = obstacle()
    if reason is None:
        try:
            open_wan("netns", sites=SITES).close()
        except LabFailedError as error:  # a container without the right to unshare, for example
            reason = str(error)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def before(monkeypatch) -> Iterator[Before]:
    mark = f"{os.getpid()}-{random.random()}"
    monkeypatch.setenv(MARK, mark)
    before = look(mark)
    yield before
    assert left_behind(before) == []


def lab(**settings) -> Wan:
    return open_wan("netns", sites=SITES, link=LinkSettings(**settings))


@contextlib.contextmanager
def connected(wan: Wan) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection that a dialled and b accepted, both ends held by this process."""
    with wan.socket("b") as server:
        server.bind((wan.listen_host("b"), 9000))
        server.listen()
        with wan.socket("a") as near:
            near.settimeout(LIMIT_S)
            near.connect((wan.sites["b"].address, 9000))
            with server.accept()[0] as far:
                far.settimeout(LIMIT_S)
                yield near, far


def arrives(far: socket.socket, *, within_s: float) -> bool:
    far.settimeout(within_s)
    try:
        return bool(far.recv(1))
    except TimeoutError:
        return False
    finally:
        far.settimeout(LIMIT_S)


def test_round_trip_and_rate_are_as_asked():
    with lab(delay_s=0.02, rate_bytes_per_s=100e6 / 8) as wan:
        assert eventually(lambda: all(checked.holds for checked in self_check(wan)))


def round_trip_s(wan: Wan, site: str, address: list[str]) -> float:
    """The least of a few."""
    return ask(wan, site, ["rtt", *address, "5"])["min_s"]


def test_congestion_control_is_the_one_asked_for_and_the_machine_keeps_its_own():
    machine = CONGESTION.read_text()
    for name in ("cubic", "reno"):
        with open_wan("netns", sites=SITES, congestion=name) as wan:
            assert wan.congestion == name
            process = wan.popen("b", ["cat", str(CONGESTION)], stdout=subprocess.PIPE, text=True)
            assert process.communicate(timeout=LIMIT_S)[0].strip() == name
        assert CONGESTION.read_text() == machine
    with pytest.raises(ConfigError, match="no congestion control warp; it has"):
        open_wan("netns", sites=SITES, congestion="warp")


def test_the_machine_gets_its_congestion_control_back_after_a_kill():
    machine = CONGESTION.read_text()
    code = (
        "import time\nfrom geotrain.lab.emulator import netns\n"
        "with netns._machine_congestion('reno'):\n    print('set', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"set\n"
        process.kill()
    deadline = time.monotonic() + LIMIT_S
    while CONGESTION.read_text() != machine:
        assert time.monotonic() < deadline


def test_sites_in_a_line_reach_each_other_through_those_between():
    wan = open_wan("netns", sites=("a", "b", "c"), link=LinkSettings(delay_s=0.02))
    with wan, serving(wan, ("a", "c")) as address:
        assert eventually(lambda: round_trip_s(wan, "a", address) == pytest.approx(0.08, abs=0.01))


def test_sites_all_to_all_have_links_of_their_own():
    links = {("a", "c"): LinkSettings(delay_s=0.03), ("c", "a"): LinkSettings(delay_s=0.05)}
    wan = open_wan("netns", sites=("a", "b", "c"), topology="mesh", links=links)
    with wan, serving(wan, ("a", "c")) as far, serving(wan, ("b", "c")) as near:
        assert eventually(lambda: round_trip_s(wan, "a", far) == pytest.approx(0.08, abs=0.01))
        assert eventually(lambda: round_trip_s(wan, "b", near) < 0.02)


def test_a_change_is_in_force_when_set_returns():
    with lab() as wan, serving(wan, ("a", "b")) as address:
        for rtt_s in (0.05, 0.0, 0.03):
            wan.set(rtt_s=rtt_s)
            assert ask(wan, "a", ["rtt", *address, "3"])["min_s"] >= rtt_s
            near = rtt_s + 0.01
            assert eventually(lambda: ask(wan, "a", ["rtt", *address, "3"])["min_s"] < near)  # noqa: B023
        assert wan.status()["links"][0]["settings"]["delay_s"] == 0.015


def test_a_cut_in_one_direction_leaves_the_other():
    with lab() as wan, connected(wan) as (near, far):
        wan.cut(source="a", target="b")
        near.sendall(b"x")
        assert not arrives(far, within_s=0.3)
        wan.mend()
        assert far.recv(1) == b"x"
        wan.cut(source="a", target="b")
        far.sendall(b"y")
        assert near.recv(1) == b"y"


def test_a_connection_that_was_silent_too_long_is_forgotten_and_a_new_one_is_not():
    with lab(idle_drop_s=LIMIT_S) as wan:
        with connected(wan) as (near, far):
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            wan.set(idle_drop_s=0.3)  # until here it may have taken any time
            time.sleep(0.5)
            near.sendall(b"y")
            assert not arrives(far, within_s=0.5)
        assert sum(link["counters"]["num_forgotten"] for link in wan.status()["links"]) > 0
        with wan.socket("b") as server, wan.socket("a") as near:
            server.bind((wan.listen_host("b"), 9001))
            server.listen()
            near.settimeout(LIMIT_S)
            near.connect((wan.sites["b"].address, 9001))


def test_single_segments_are_lost_and_what_arrives_is_what_was_sent():
    total = 32 << 20
    with lab(delay_s=0.001, loss=0.002, rate_bytes_per_s=50e6) as wan:
        sent = random.Random(1).randbytes(1 << 20)
        code = (
            "import hashlib, socket, sys\n"
            f"server = socket.create_server(('{wan.listen_host('b')}', 9000))\n"
            "print('up', flush=True)\n"
            "far, digest = server.accept()[0], hashlib.sha256()\n"
            "while data := far.recv(1 << 20): digest.update(data)\n"
            "print(digest.hexdigest())"
        )
        receiver = wan.popen("b", [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with receiver, wan.socket("a") as near:
            assert receiver.stdout.readline() == "up\n"
            near.settimeout(60)
            near.connect((wan.sites["b"].address, 9000))
            digest = hashlib.sha256()
            for _ in range(total >> 20):
                near.sendall(sent)
                digest.update(sent)
            near.shutdown(socket.SHUT_WR)
            assert receiver.stdout.readline().strip() == digest.hexdigest()
        there = wan.status()["links"][0]["counters"]
    assert there["num_segments"] > there["num_packets"] * 2, "nothing was offloaded"
    assert 0.0012 < there["num_lost"] / there["num_segments"] < 0.003


def test_a_lab_is_found_by_its_name():
    name = f"test-{os.getpid()}"
    with open_wan("netns", sites=SITES, name=name) as wan:
        again = find_wan(name)
        again.set(loss=0.5, why="elsewhere")
        assert wan.status()["events"][-1]["why"] == "elsewhere"
        again.release()
        with pytest.raises(ConfigError, match=f"a lab called {name} already"):
            open_wan("netns", sites=SITES, name=name)
    with pytest.raises(ConfigError, match="no lab called"):
        find_wan(name)


def owner() -> tuple[subprocess.Popen, dict]:
    process = subprocess.Popen(
        [sys.executable, str(OWNER), "netns"], stdout=subprocess.PIPE, text=True
    )
    text = process.stdout.readline()
    assert text, "the owner did not come up"
    return process, json.loads(text)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_nothing_is_left_when_the_owner_is_killed(number):
    process, _ = owner()
    with process:
        process.send_signal(number)
    # The fixture looks for the rest: namespaces, forwarders, and what ran in the sites.


@pytest.mark.parametrize("victim", ["keeper", "forwarder"])
def test_nothing_is_left_when_a_part_is_killed(victim, before):
    process, pids = owner()
    with process:
        try:
            os.kill(pids["keeper"] if victim == "keeper" else pids["forwarders"][1], signal.SIGKILL)
            assert left_behind(before, but=process.pid) == []
        finally:
            process.kill()


def test_an_owner_is_told_that_its_lab_has_ended():
    with lab() as wan:
        os.kill(wan.status()["links"][1]["counters"]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        with pytest.raises(LabFailedError, match=r"forwarder b to a has ended|without a word"):
            while time.monotonic() < deadline:
                wan.status()
                time.sleep(0.02)


def test_kills_at_random_moments_leave_nothing(tmp_path):
    rng = random.Random(4)
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, str(OWNER), "netns"],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        with process:
            time.sleep(rng.uniform(0.0, 0.6))
            process.kill()
    assert list(tmp_path.iterdir()) == []
