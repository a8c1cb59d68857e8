"""What happens to a link under load: everything arrives, bit-equal, in order and once.

    python -m pytest tests/faults                          2 seeds, short: a part of `make test`
    FAULT_SEEDS=20 FAULT_LENGTH=full python -m pytest ...  `make faults`: as long as they last

FAULT_TLS=1 has all of them over links with TLS instead.

A fault holds for a length that is the fault itself; everything else waits for what it needs.
"""

import os
import signal
import time
from collections.abc import Iterator
from random import Random

import pytest

from geotrain.lab.emulator.netns import obstacle
from geotrain.transport.frame import FrameType, chunk_header, control_frame
from geotrain.transport.http import FROM_HEADER, PATH, TO_HEADER, UPGRADE
from tests.faults.line import Line, NamespaceNet, RelayNet
from tests.faults.traffic import Traffic

SEEDS = range(int(os.environ.get("FAULT_SEEDS", "2")))
IS_FULL = os.environ.get("FAULT_LENGTH") == "full"
SILENT_S = 10.0 if IS_FULL else 1.0
"""As configs have it, or so that a dead lane is noticed in a test's time."""
LIMIT_S = 400.0 if IS_FULL else 60.0
MOST_ATTEMPTS = 3
KINDS = ["relay", "netns"] if obstacle() is None else ["relay"]
ALL_TLS = bool(os.environ.get("FAULT_TLS"))
if ALL_TLS:
    KINDS = [f"{kind} tls" for kind in KINDS]
elif not IS_FULL:
    KINDS.append("relay tls")
IN_KERNEL = (
    "test_silent_cut_that_outlasts_the_lane",
    "test_delay_that_jumps_and_jitters",
    "test_a_nat_that_forgets_idle_connections",
)
IN_TLS = ("test_reset", "test_one_direction_black_holed")
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture(scope="module", params=KINDS)
def line(request, tmp_path_factory) -> Iterator[Line]:
    kind, _, tls = request.param.partition(" ")
    net = RelayNet(seed=1) if kind == "relay" else NamespaceNet(seed=1)
    folder = tmp_path_factory.mktemp("line")
    with Line(folder, net, silent_s=SILENT_S, tls=tls == "tls") as started:
        yield started


@pytest.fixture(params=SEEDS)
def load(request, line) -> Iterator[tuple[Traffic, Random]]:
    """Traffic that is under way, and the chance of this seed."""
    if line.net.kind == "netns" and not IS_FULL:
        name = request.function.__name__
        if request.param > 0 or name not in IN_KERNEL:
            pytest.skip("in short through namespaces only what TCP itself has a part in, once")
    if line.tls and not (IS_FULL or ALL_TLS):
        if request.param > 0 or request.function.__name__ not in IN_TLS:
            pytest.skip("in short with TLS only what ends lanes, once; FAULT_TLS=1 for all")
    rng = Random(request.param)
    with Traffic(line, seed=request.param, limit_s=LIMIT_S) as traffic:
        traffic.progress(rng.randint(1, 20))
        traffic.until(lambda: all(rank.has_all_lanes for rank in traffic.ranks), "every lane")
        yield traffic, rng
        for rank in traffic.ranks:
            rank.is_paused = False
        traffic.progress(5)  # it goes on afterwards
    assert all(daemon.poll() is None for daemon in line.daemons.values())


def hold(short_s: float, full_s: float) -> None:
    """For as long as the fault lasts: nothing tells its end but time."""
    time.sleep(full_s if IS_FULL else short_s)


def relay_of(line: Line) -> RelayNet:
    """The relay, which alone can reset connections; between namespaces only the kernel can."""
    if not isinstance(line.net, RelayNet):
        pytest.skip("connections between namespaces are the kernel's alone to reset")
    return line.net


@pytest.mark.parametrize("all_lanes", [False, True], ids=["one lane", "all lanes"])
def test_reset(line, load, all_lanes):
    relay = relay_of(line)
    traffic, rng = load
    for _ in range(3 if IS_FULL else 1):
        before = traffic.lanes()
        relay.reset(all_lanes=all_lanes)
        traffic.until(lambda before=before: traffic.lanes() > before, "another lane")
        traffic.progress(rng.randint(0, 5))


def test_silent_cut_that_tcp_bridges(line, load):
    line.net.set(cut=True)
    try:
        hold(0.4, 5.0)
    finally:
        line.net.set(cut=False)


def test_silent_cut_that_outlasts_the_lane(line, load):
    traffic, _ = load
    line.net.set(cut=True)
    try:
        traffic.until(lambda: all(rank.link_is_down for rank in traffic.ranks), "the cut")
        hold(0.1, 40.0 - SILENT_S)
    finally:
        line.net.set(cut=False)


def test_one_direction_black_holed(line, load):
    traffic, rng = load
    line.net.set(forward=rng.random() < 0.5, cut=True)
    try:
        traffic.until(lambda: all(rank.link_is_down for rank in traffic.ranks), "the cut")
    finally:
        line.net.set(cut=False)


def test_delay_that_jumps_and_jitters(line, load):
    """Reordering between lanes, where a link has several; and on each lane whatever TCP does."""
    traffic, rng = load
    is_lossy = line.net.kind == "netns"
    try:
        for _ in range(3):
            delay_s = rng.uniform(0.0, 0.05)
            line.net.set(delay_s=delay_s, jitter_s=0.02, loss=0.01 if is_lossy else 0.0)
            traffic.progress(5)
    finally:
        line.net.set(delay_s=0.005, jitter_s=0.0, loss=0.0)


def test_a_daemon_stopped_in_the_midst(line, load):
    _, rng = load
    pid = line.pid(rng.choice(["a", "b"]))
    os.kill(pid, signal.SIGSTOP)
    try:
        hold(1.5 * SILENT_S, 20.0)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_arena_full(line, load):
    """A rank that takes nothing: no lane is paused for it, and the other direction goes on."""
    traffic, rng = load
    lazy, busy = rng.sample(traffic.ranks, 2)
    lazy.is_paused = True
    traffic.until(lambda: busy.is_full, "no credit left")
    traffic.until(lambda: lazy.is_resting, "nothing being taken")
    taken = lazy.num_taken

    def keeps_its_lanes() -> bool:
        lanes, before = traffic.lanes(), busy.num_taken
        hold(0.3, 60.0)
        traffic.until(lambda: busy.num_taken >= before + 5, "the other direction")
        assert lazy.num_taken == taken
        return traffic.lanes() == lanes

    # A busy machine may let a daemon be silent for too long, but not again and again.
    assert any(keeps_its_lanes() for _ in range(MOST_ATTEMPTS))


def test_a_nat_that_forgets_idle_connections(line, load):
    """Pings are further apart than the NAT remembers, so an idle link loses its lane."""
    traffic, _ = load
    lanes = traffic.lanes()
    line.net.set(idle_drop_s=SILENT_S / 20)
    try:
        for rank in traffic.ranks:
            rank.is_paused = True
        traffic.until(lambda: all(rank.is_full for rank in traffic.ranks), "an idle link")
        traffic.until(lambda: all(rank.link_is_down for rank in traffic.ranks), "the drop")
        for rank in traffic.ranks:
            rank.is_paused = False
        traffic.until(lambda: traffic.lanes() > lanes, "another lane")
    finally:
        line.net.set(idle_drop_s=None)


def garbage(rng: Random) -> list[bytes]:
    """What someone may send who reaches the port: nonsense, half an upgrade, no frames."""
    upgrade = (
        f"GET {PATH} HTTP/1.1\r\nHost: b\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
        f"{FROM_HEADER}: a\r\n{TO_HEADER}: b\r\n\r\n"
    ).encode()
    chunk = chunk_header(stream=0, view=1, seq=0, raw_offset=0, raw=memoryview(b"x"))
    return [
        rng.randbytes(rng.randint(1, 5_000)),
        b"GET " + b"/" * 100_000,
        upgrade[: rng.randint(1, len(upgrade))],
        upgrade + rng.randbytes(5_000),
        upgrade + control_frame(FrameType.HELLO, {"proto": 1}),
        upgrade + chunk + b"x",
        upgrade + control_frame(FrameType.HELLO, {"run": "x" * 200_000})[:100_000],
    ]


def test_a_peer_that_sends_garbage(line, load):
    traffic, rng = load
    port = line.listen_port("b")
    socks = [line.net.connect(port) for _ in range(7)]
    try:
        for sock, data in zip(socks, rng.sample(garbage(rng), 7), strict=True):
            sock.sendall(data)
            traffic.progress(1)
    finally:
        for sock in socks:
            sock.close()
