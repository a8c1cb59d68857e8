import asyncio
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest

from geotrain.lab.certificates import make_certificates
from geotrain.transport import http
from geotrain.transport.carrier import Carrier, DialError
from geotrain.transport.http import PATH, UPGRADE, LinkServer, dial
from geotrain.transport.tls import Tls, load_tls

DEADLINE_S = 30.0


@dataclass(frozen=True)
class Way:
    """How the ends of a link meet: plainly, or with TLS."""

    a: Tls | None = None
    b: Tls | None = None

    def url(self, server: LinkServer) -> str:
        return f"{'http' if self.b is None else 'https'}://127.0.0.1:{server.port}"

    def dial(self, server: LinkServer, **changes):
        how = {"region": "a", "to": "b", "timeout_s": DEADLINE_S, "tls": self.a, **changes}
        return dial(self.url(server), **how)

    def visit(self, server: LinkServer):
        """A connection that has spoken TLS, where it must, and nothing else."""
        secured = {} if self.a is None else {"ssl": self.a.client, "server_hostname": "b"}
        return asyncio.open_connection("127.0.0.1", server.port, **secured)


@pytest.fixture(scope="module", params=["plain", "tls"])
def way(request, tmp_path_factory):
    if request.param == "plain":
        return Way()
    files = make_certificates(tmp_path_factory.mktemp("tls"), ["a", "b"])
    return Way(**{name: load_tls(files[name], region=name) for name in files})


class Recorder:
    """The upper end of a carrier: keeps what arrives, echoes it when asked to."""

    def __init__(self, *, echo: bool = False, buffer_bytes: int = 65_536) -> None:
        self.carrier: Carrier | None = None
        self.received = bytearray()
        self.reason: str | None = None
        self.changed = asyncio.Event()
        self.is_paused = False
        self._echo = echo
        self._buffer = bytearray(buffer_bytes)

    def start(self, carrier: Carrier) -> None:
        self.carrier = carrier
        carrier.start(self)

    accept = start

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]
        if self._echo and self.carrier is not None:
            self.carrier.write(bytes(self._buffer[:nbytes]))
        self.changed.set()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.changed.set()

    def connection_lost(self, reason: str) -> None:
        self.reason = reason
        self.changed.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def met(way: Way, far: Recorder):
    """A server whose every connection `far` gets, and one dialled there: (server, carrier, end)."""
    link_server = LinkServer(tls=way.b)
    await link_server.start("127.0.0.1", 0, lambda region: far)
    try:
        async with way.dial(link_server) as carrier:
            end = Recorder()
            end.start(carrier)
            carrier.write(b"x")
            await far.until(lambda: far.received == b"x")
            yield link_server, carrier, end
    finally:
        await link_server.close()


@pytest.fixture
async def server(way):
    """A LinkServer on which every connection of "a" is echoed; the echoing ends are in `ends`."""
    link_server = LinkServer(tls=way.b)
    link_server.ends = []

    def links(region):
        if region != "a":
            return None
        link_server.ends.append(Recorder(echo=True))
        return link_server.ends[-1]

    await link_server.start("127.0.0.1", 0, links)
    yield link_server
    await link_server.close()


async def test_bytes_cross_the_hand_over_whole_every_time(way, server):
    payload = bytes(range(256)) * 1000
    for _ in range(30):
        async with way.dial(server) as carrier:
            end = Recorder()
            end.start(carrier)
            carrier.write(b"first")
            carrier.write(payload)
            await end.until(lambda end=end: len(end.received) == 5 + len(payload))
            assert end.received == b"first" + payload
            assert carrier.peer_address == f"127.0.0.1:{server.port}"
            assert carrier.congestion
            assert carrier.tls.split(",")[0] == ("TLSv1.3" if way.a else "no")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets programs choose")
async def test_each_end_has_the_congestion_control_that_it_asked_for(way):
    link_server = LinkServer(congestion="reno", tls=way.b)
    far = Recorder()
    await link_server.start("127.0.0.1", 0, lambda region: far)
    try:
        async with way.dial(link_server, congestion="nosuch") as carrier:
            end = Recorder()
            end.start(carrier)
            carrier.write(b"x")
            await far.until(lambda: far.received == b"x")
            assert (far.carrier.congestion, far.carrier.congestion_refused) == ("reno", "")
            assert carrier.congestion not in ("", "nosuch")
            assert "nosuch cannot be had here" in carrier.congestion_refused
    finally:
        await link_server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets programs choose")
async def test_a_connection_of_control_records_alone_is_not_under_the_control_of_bulk(way, server):
    async with way.dial(server, congestion="reno") as carrier:
        carrier.start(Recorder())

        def in_force() -> bytes:
            raw = carrier._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            return raw.rstrip(b"\0")

        found = [in_force()]
        for bulk in (False, True):
            carrier.carry(bulk=bulk)
            found.append(in_force())
        assert found == [b"reno", b"cubic", b"reno"]
        assert carrier.congestion == "reno"  # what bulk would have here
    await carrier.closed.wait()
    carrier.carry(bulk=False)  # too late, and no error


async def test_end_of_one_side_is_told_to_the_other(way, server):
    async with way.dial(server) as carrier:
        end = Recorder()
        end.start(carrier)
        carrier.write(b"x")
        await end.until(lambda: end.received == b"x")
        server.ends[0].carrier.close()
        await end.until(lambda: end.reason is not None)
    assert end.reason == "the peer closed the connection"
    await server.ends[0].until(lambda: server.ends[0].reason is not None)


async def test_server_closes_at_once_with_lanes_open(way):
    far = Recorder()
    async with met(way, far) as (link_server, _, end):
        async with asyncio.timeout(DEADLINE_S):  # aiohttp by itself would wait a minute
            await link_server.close()
        await end.until(lambda: end.reason is not None)
    assert far.reason is not None


async def test_unknown_region_is_answered_with_the_reason(way, server):
    who = {
        "plain": "region 'c' is no peer of this daemon",
        "tls": "the certificate names a, not 'c'",
    }
    with pytest.raises(DialError) as caught:
        async with way.dial(server, region="c"):
            pass
    assert str(caught.value) == f"answered 403 {who['tls' if way.b else 'plain']}"


async def test_other_visitors_get_plain_answers(way, server):
    async with aiohttp.ClientSession() as http:
        secured = {} if way.a is None else {"ssl": way.a.client, "server_hostname": "b"}
        async with http.get(way.url(server) + PATH, **secured) as response:
            assert (response.status, response.headers["Upgrade"]) == (426, UPGRADE)
        async with http.get(way.url(server) + "/elsewhere", **secured) as response:
            assert response.status == 404


async def test_nothing_listening_is_said_plainly():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(DialError, match=f"nothing listens at {url}"):
            async with dial(url, region="a", to="b", timeout_s=DEADLINE_S):
                pass


async def test_name_that_does_not_resolve_is_said_plainly():
    with pytest.raises(DialError, match=r"the name nowhere\.invalid does not resolve"):
        async with dial("http://nowhere.invalid:7070", region="a", to="b", timeout_s=DEADLINE_S):
            pass


async def test_peer_that_never_answers_meets_the_deadline():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DialError, match=r"no answer from .* within 0\.2 s"):
            async with dial(url, region="a", to="b", timeout_s=0.2):
                pass


async def test_port_in_use_is_an_os_error(server):
    other = LinkServer()
    with pytest.raises(OSError, match="in use"):
        await other.start("127.0.0.1", server.port, lambda region: None)


async def test_a_connection_that_asks_for_nothing_is_closed(way, monkeypatch):
    link_server = LinkServer(tls=way.b)
    ends = [Recorder(echo=True)]
    await link_server.start("127.0.0.1", 0, lambda region: ends[0])
    try:
        async with way.dial(link_server) as carrier:
            lane = Recorder()
            lane.start(carrier)
            monkeypatch.setattr(http, "FIRST_REQUEST_S", 0.5)  # for those that come from now on
            reader, writer = await way.visit(link_server)
            async with asyncio.timeout(DEADLINE_S):
                assert await reader.read() == b""
            writer.close()
            carrier.write(b"still here")
            await lane.until(lambda: lane.received == b"still here")
    finally:
        await link_server.close()


async def test_what_a_stranger_answers_stays_on_one_line_of_the_log():
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 No\r\nContent-Length: 20\r\n\r\nno\n12:00:00 \x1b[2Jfake")
        writer.close()

    stranger = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with stranger:
        url = f"http://127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
        with pytest.raises(DialError) as caught:
            async with dial(url, region="a", to="b", timeout_s=DEADLINE_S):
                pass
    assert str(caught.value) == "answered 403 no?12:00:00 ?[2Jfake"


async def test_nonsense_leaves_no_traceback_but_our_own_faults_do(way, caplog):
    def broken(region):
        raise RuntimeError("a fault of ours")

    link_server = LinkServer(tls=way.b)
    await link_server.start("127.0.0.1", 0, broken)
    try:
        reader, writer = await way.visit(link_server)
        writer.write(b"\x00\x01nonsense\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert b"400" in await reader.readline()
        writer.close()
        assert caplog.records == []
        with pytest.raises(DialError, match="500"):
            async with way.dial(link_server):
                pass
        assert "a fault of ours" in caplog.text
    finally:
        await link_server.close()


async def test_abort_after_a_close_that_had_bytes_to_write_does_nothing(way, server):
    async with way.dial(server) as carrier:
        Recorder().start(carrier)
        carrier.write(bytes(8 << 20))
        carrier.close()
        async with asyncio.timeout(DEADLINE_S):
            await carrier.closed.wait()
        carrier.abort()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells only there")
async def test_the_kernel_tells_what_was_acknowledged_and_takes_a_pace(way, server):
    async with way.dial(server) as carrier:
        end = Recorder()
        end.start(carrier)
        before = carrier.counts()
        for rate in (10e6, 1e12):
            carrier.pace(rate)
        carrier.write(bytes(100_000))
        await end.until(lambda: len(end.received) == 100_000)
        after = carrier.counts()
        # All of it came back, so it was acknowledged, but perhaps for the last of the packets.
        # TLS adds 22 bytes to each record of 16 KiB, and its last word to ours.
        assert 0 < after.acked_bytes - before.acked_bytes <= 100_000 + (2_000 if way.a else 0)
        is_bbr = carrier.congestion == "bbr"
        assert (before.bbr is not None) is (after.bbr is not None) is is_bbr
        if is_bbr:
            assert not before.bbr.is_probed and 0 < after.bbr.min_rtt_us < DEADLINE_S * 1e6
        # A busy machine may make TCP send something again, over loopback too.
        assert 0 <= after.retransmitted_bytes <= 100_000 and 0 < after.rtt_s < DEADLINE_S
    carrier.pace(10e6)
    assert carrier.counts() is None


async def test_what_waits_in_a_full_carrier_is_bounded_and_told_at_once(way):
    far = Recorder()
    piece = bytes(range(256)) * 1024
    async with met(way, far) as (_, carrier, end):
        far.carrier.pause_reading()
        written, turns_full, num_sent = 1, 0, 0
        while turns_full < 3:  # The kernel's buffers grow for a while.
            assert written < 64 << 20, "no kernel's buffers are so large"
            if not end.is_paused:
                carrier.write(piece)
                written += len(piece)
            # What waits is no more than the write that paused us, and its TLS records.
            assert carrier.bytes_waiting <= len(piece) * 1.01
            assert end.is_paused == (carrier.bytes_waiting > 0)
            # Bytes that arrive meanwhile do not pass for room.
            far.carrier.write(b"y")
            num_sent += 1
            await end.until(lambda count=num_sent: len(end.received) == count)
            assert end.is_paused == (carrier.bytes_waiting > 0)
            turns_full = turns_full + 1 if end.is_paused else 0
        far.carrier.resume_reading()
        await end.until(lambda: not end.is_paused)
        assert carrier.bytes_waiting == 0
        await far.until(lambda: len(far.received) == written)
        assert far.received[1:] == piece * (written // len(piece))


async def test_a_side_that_ends_its_writing_still_reads_what_comes(way):
    far = Recorder()
    async with met(way, far) as (_, carrier, end):
        far.carrier.pause_reading()
        carrier.write(b"the last word")
        carrier.end_writing()
        far.carrier.write(bytes(300_000))
        await end.until(lambda: len(end.received) == 300_000)
        assert end.reason is None
        far.carrier.resume_reading()
        await far.until(lambda: far.reason is not None)
        assert far.received == b"xthe last word"
        await end.until(lambda: end.reason is not None)
        assert end.reason == "the peer closed the connection"


async def test_all_that_was_sent_arrives_before_the_end_whether_read_at_once_or_not(way):
    """In small buffers, of which asyncio's TLS would hand on one."""
    payload = bytes(range(250)) * 80
    for is_paused in (False, True):
        far = Recorder(buffer_bytes=1000)
        async with met(way, far) as (_, carrier, _):
            if is_paused:
                far.carrier.pause_reading()
            carrier.write(payload)
            carrier.close()
            await carrier.closed.wait()
            if is_paused:
                far.carrier.resume_reading()
            await far.until(lambda far=far: far.reason is not None)
        assert far.received == b"x" + payload
        assert far.reason == "the peer closed the connection"
