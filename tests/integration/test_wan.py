"""The lab's one interface over relays, which every machine can have, and how the kind is chosen."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from geotrain.errors import ConfigError
from geotrain.lab import wan as wan_module
from geotrain.lab.emulator.sites import LabFailedError
from geotrain.lab.selfcheck import self_check
from geotrain.lab.settings import LinkSettings
from geotrain.lab.wan import Wan, find_wan, names_of_labs, open_wan
from tests.lab.eventually import eventually

LIMIT_S = 30.0


@pytest.fixture
def lab() -> Iterator[Wan]:
    with open_wan("relay", sites=("a", "b", "c")) as wan:
        yield wan


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(LIMIT_S)
        yield listening


def connected(wan: Wan, server: socket.socket, target: str) -> tuple[socket.socket, socket.socket]:
    route = wan.route("a", target, 0)
    near = socket.create_connection((route.host, route.port), timeout=LIMIT_S)
    wan.aim(route, server.getsockname()[1])
    far, _ = server.accept()
    far.settimeout(LIMIT_S)
    return near, far


def echo_s(near: socket.socket, far: socket.socket) -> float:
    started = time.monotonic()
    near.sendall(b"x")
    far.sendall(far.recv(1))
    assert near.recv(1) == b"x"
    return time.monotonic() - started


def test_links_change_while_connections_are_open_each_way_by_itself(lab, server):
    near, far = connected(lab, server, "b")
    with near, far:
        assert eventually(lambda: echo_s(near, far) < 0.05)
        lab.set(source="a", target="b", delay_s=0.1)
        assert echo_s(near, far) >= 0.1
        assert eventually(lambda: echo_s(near, far) < 0.19)
        lab.set(between=("a", "b"), rtt_s=0.3)
        assert echo_s(near, far) >= 0.3
        lab.set(rtt_s=0.0)
        lab.cut(source="a", target="b")
        near.sendall(b"held")
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(4)
        lab.mend()
        far.settimeout(LIMIT_S)
        assert far.recv(4) == b"held"


def test_a_route_over_two_links_has_the_delay_of_both(lab, server):
    lab.set(rtt_s=0.1)
    near, far = connected(lab, server, "c")
    with near, far:
        assert echo_s(near, far) >= 0.2


def test_rate_and_round_trip_are_as_asked():
    link = LinkSettings(delay_s=0.01, rate_bytes_per_s=100e6 / 8)
    with open_wan("relay", sites=("a", "b"), link=link) as wan:
        assert eventually(lambda: all(checked.holds for checked in self_check(wan)))


def test_a_script_changes_links_in_time_and_is_told_in_the_status(lab):
    text = "[[change]]\nat_s = 0.1\nfrom = 'a'\nto = 'b'\nrtt_ms = 80\nwhy = 'rain'\n"
    assert lab.start_script(text) == 0.1
    deadline = time.monotonic() + LIMIT_S
    while not (events := lab.status()["events"]):
        assert time.monotonic() < deadline
    assert (events[0]["why"], events[0]["links"]) == ("rain", "a to b")
    assert lab.status()["links"][0]["settings"]["delay_s"] == 0.04
    with pytest.raises(ConfigError, match=r"weather\.toml: change 1: unknown key"):
        lab.start_script("[[change]]\nspeed = 1", file="weather.toml")


def test_what_cannot_be_is_refused_and_changes_nothing(lab):
    before = lab.status()["links"]
    for wrong in ({"loss": 2.0}, {"speed": 1.0}, {"between": ("a", "c"), "loss": 0.1}):
        with pytest.raises(ConfigError):
            lab.set(**wrong)
    with pytest.raises(ConfigError, match="not both"):
        lab.set(between=("a", "b"), source="a", loss=0.1)
    with pytest.raises(ConfigError, match="no site nowhere"):
        lab.command("nowhere", ["true"])
    assert lab.status()["links"] == before


def test_programs_run_as_they_are_where_there_are_no_namespaces(lab):
    assert lab.command("a", ["true"]) == ["true"]
    assert lab.listen_host("a") == "127.0.0.1"
    assert lab.congestion is None


def test_auto_falls_back_and_says_why(monkeypatch):
    monkeypatch.setattr(wan_module, "obstacle", lambda: "network namespaces need root")
    with open_wan("auto", sites=("a", "b")) as wan:
        assert wan.kind == "relay"
        assert wan.reason.startswith("not namespaces, since network namespaces need root; ")
    with pytest.raises(LabFailedError, match="need root; --emulator relay needs none"):
        open_wan("netns", sites=("a", "b"))


def test_a_lab_is_found_by_its_name_and_ends_with_its_owner():
    name = f"test-relay-{os.getpid()}"
    code = (
        "import sys\nfrom geotrain.lab.wan import open_wan\n"
        f"wan = open_wan('relay', sites=('a', 'b'), name='{name}')\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout.readline() == b"up\n"
        assert name in names_of_labs()
        wan = find_wan(name)
        wan.set(rtt_s=0.1)
        wan.release()
        owner.kill()
    deadline = time.monotonic() + LIMIT_S
    while name in names_of_labs():
        assert time.monotonic() < deadline
    with pytest.raises(ConfigError, match=f"no lab called {name} is running"):
        find_wan(name)


def test_a_closed_lab_says_so(lab):
    lab.close()
    lab.close()
    with pytest.raises(LabFailedError, match="was closed"):
        lab.set(loss=0.1)
