import asyncio
import logging
import random
import tempfile
import zlib
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest

from geotrain.lab.certificates import make_certificates
from geotrain.transport import bulk_lanes, rate_control
from geotrain.transport.carrier import DialError
from geotrain.transport.congestion import probe as choose_on_this_machine
from geotrain.transport.estimator import RttEstimator
from geotrain.transport.fake_carrier import carrier_pair
from geotrain.transport.hello import Join
from geotrain.transport.http import LinkServer
from geotrain.transport.lane import Lane
from geotrain.transport.lanes import MAX_LANES
from geotrain.transport.link import Link, LinkSettings
from geotrain.transport.messages import Message, Presence
from geotrain.transport.pings import BUSY_INTERVAL_S
from geotrain.transport.protocol import LaneProtocol
from geotrain.transport.session import Session
from geotrain.transport.tls import Tls, load_tls
from tests.transport.lane_pair import RUN, make_hello

VIEW = 7
RING_BYTES = 8 << 20
DEADLINE_S = 30.0


class ZlibCoder:
    def encode(self, raw: memoryview) -> bytes | None:
        return zlib.compress(raw, 1)

    def decode_into(self, coded: memoryview, out: memoryview) -> None:
        try:
            out[:] = zlib.decompress(coded)
        except zlib.error as exc:
            raise ValueError("damaged") from exc


class Site:
    """A daemon's part around one link: keeps what it is told, releases at once unless held."""

    def __init__(
        self,
        region: str,
        *,
        url=None,
        dial=None,
        coder=None,
        num_lanes=None,
        silent_s=2.0,
        tls=None,
        **changes,
    ):
        self.hello = make_hello(region, **changes)
        self.changed = asyncio.Event()
        self.acked: list[int] = []
        self.delivered: list[bytes] = []
        self.boards: list[Presence] = []
        self.failed: list[str] = []
        self.states: list[str] = []
        self.hold = False
        self.board = [Presence(region=region, revision=1)]
        self.ring = bytearray(RING_BYTES)
        self.sends = 0 if region == "a" else 1
        self.num_offered = 0
        self.link = Link(
            hello=self.hello,
            peer=self.hello.to,
            url=url,
            coder=coder or ZlibCoder(),
            settings=LinkSettings(ping_interval_s=0.1, silent_s=silent_s, num_lanes=num_lanes),
            board=lambda: self.board,
            on_board=self._on_board,
            on_delivered=self._on_delivered,
            on_acked=self._on_acked,
            on_state=self._on_state,
            on_failed=self._on_failed,
            dial=dial,
            tls=tls,
            rng=random.Random(1),
        )

    def _on_board(self, entries: list[Presence]) -> None:
        self.boards += entries
        self.changed.set()

    def _on_delivered(self, message: Message) -> None:
        end = message.start + message.payload_bytes
        self.delivered.append(message.inline or bytes(self.ring[message.start : end]))
        if not self.hold:
            self.link.release(message.stream, message.view, [message.seq])
        self.changed.set()

    def _on_acked(self, stream: int, view: int, seqs: list[int], wire_bytes: list[int]) -> None:
        self.acked += seqs
        self.changed.set()

    def _on_failed(self, view: int, reason: str) -> None:
        self.failed.append(reason)
        self.changed.set()

    def _on_state(self) -> None:
        self.states.append(self.link.stats()["state"])
        self.changed.set()

    def open_view(self, view: int = VIEW) -> None:
        receives = {1 - self.sends: memoryview(self.ring)}
        self.link.open_view(view, {self.sends: RING_BYTES}, receives)

    def offer(self, payload: bytes, *, hints=()) -> None:
        inline = len(payload) <= 1024
        message = Message(
            stream=self.sends,
            view=VIEW,
            seq=self.num_offered,
            kind="forward",
            step=0,
            microbatch=0,
            payload_bytes=0 if inline else len(payload),
            inline=payload if inline else b"",
            hints=hints,
        )
        self.num_offered += 1
        self.link.offer(message, None if inline else memoryview(payload))

    @property
    def state(self) -> str:
        return self.link.stats()["state"]

    async def until(self, condition) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def running(*sites: Site):
    tasks = [asyncio.create_task(site.link.run()) for site in sites]
    try:
        yield
    finally:
        for site in sites:
            await site.link.close("test over")
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks)
        assert all(task.cancelled() for task in done)


@cache
def certificates() -> dict[str, Tls]:
    with tempfile.TemporaryDirectory() as folder:
        files = make_certificates(Path(folder), ["a", "b"])
        return {name: load_tls(files[name], region=name) for name in files}


plain_and_tls = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


@asynccontextmanager
async def served(*, dialler_changes=None, both_dial=False, coder=None, num_lanes=None, tls=False):
    """Two sites over real sockets: a dials b; with `both_dial` b also dials a.

    Lanes are counted, so none may be lost to silence, whatever else the machine has to do.
    """
    secured = certificates() if tls else {}
    server_a, server_b = (LinkServer(tls=secured.get(name)) for name in "ab")
    scheme = "https" if tls else "http"
    sites: dict[str, Site] = {}
    await server_a.start("127.0.0.1", 0, lambda region: sites["a"].link if region == "b" else None)
    await server_b.start("127.0.0.1", 0, lambda region: sites["b"].link if region == "a" else None)
    common = {"coder": coder, "silent_s": DEADLINE_S}
    url = f"{scheme}://127.0.0.1:{server_b.port}"
    changes = {"tls": secured.get("a"), **common, **(dialler_changes or {})}
    sites["a"] = Site("a", url=url, num_lanes=num_lanes, **changes)
    url = f"{scheme}://127.0.0.1:{server_a.port}" if both_dial else None
    sites["b"] = Site("b", url=url, tls=secured.get("b") if both_dial else None, **common)
    try:
        async with running(sites["a"], sites["b"]):
            yield sites["a"], sites["b"]
    finally:
        await server_a.close()
        await server_b.close()


def _payloads(count: int) -> list[bytes]:
    rng = random.Random(3)
    return [rng.randbytes(1_500_000) + bytes(1_500_000) for _ in range(count)]


@plain_and_tls
async def test_messages_cross_both_ways_over_real_sockets(tls):
    async with served(tls=tls) as (a, b):
        a.open_view()
        b.open_view()
        for payload in (*_payloads(4), b"small"):
            a.offer(payload)
            b.offer(payload)
        for site in (a, b):
            await site.until(lambda site=site: len(site.delivered) == len(site.acked) == 5)
            assert site.delivered == [*_payloads(4), b"small"]
            stats = site.link.stats()
            assert stats["state"] == "connected" and stats["rtt_s"]["min"] > 0
            assert stats["bytes_sent"] > 12_000_000 and stats["bytes_received"] > 12_000_000


async def test_hinted_ranges_travel_coded():
    async with served() as (a, b):
        a.open_view()
        b.open_view()
        payload = _payloads(1)[0]
        a.offer(payload, hints=((1_000_000, 2_000_000),))
        await a.until(lambda: a.acked == [0])
        assert b.delivered == [payload]
        assert a.link.stats()["bytes_sent"] < 1_700_000
        assert a.link.stats()["payload_bytes_sent"] == len(payload)


async def _reach(site: Site, num_bytes: int) -> None:
    """Let the loop turn until the site has received so much: usually inside a chunk."""
    async with asyncio.timeout(DEADLINE_S):
        while site.link.stats()["bytes_received"] < num_bytes:
            await asyncio.sleep(0)


@plain_and_tls
async def test_connection_reset_in_mid_message_resumes(tls):
    async with served(tls=tls) as (a, b):
        a.open_view()
        b.open_view()
        payloads = _payloads(6)
        for payload in payloads:
            a.offer(payload, hints=((1_000_000, 2_000_000),))
        for resets in range(1, 4):
            await _reach(b, resets * 2_000_000)
            (a if resets % 2 else b).link.lanes.control.carrier.abort()
            await b.until(lambda: b.state != "connected")
            await b.until(lambda: b.state == "connected")
        await a.until(lambda: len(a.acked) == 6)
        assert b.delivered == payloads
        assert b.link.stats()["lanes_opened"] == 4
        # What had arrived was not sent again: six messages of about 2 MB, three cuts of a few MiB.
        assert a.link.stats()["bytes_sent"] < 6 * 2_300_000 + 3 * 4_000_000


async def _bulk_lane(site: Site) -> Lane:
    async with asyncio.timeout(DEADLINE_S):
        while not any(lane.protocol.carries_chunks for lane in site.link.lanes.bulk.open.values()):
            await asyncio.sleep(0)
    return next(iter(site.link.lanes.bulk.open.values()))


@pytest.mark.parametrize("num_lanes", [1, 4])
async def test_bulk_lane_reset_in_mid_message_costs_only_what_it_had_not_delivered(num_lanes):
    async with served(num_lanes=num_lanes) as (a, b):
        await _bulk_lane(a)
        await _bulk_lane(b)
        a.open_view()
        b.open_view()
        payloads = _payloads(6)
        for payload in payloads:
            a.offer(payload, hints=((1_000_000, 2_000_000),))
            b.offer(payload)
        for resets in range(1, 4):
            await _reach(b, resets * 2_000_000)
            lane = await _bulk_lane(a if resets % 2 else b)
            lane.carrier.abort()
        for site in (a, b):
            await site.until(lambda site=site: len(site.acked) == len(site.delivered) == 6)
            assert site.delivered == payloads
            assert site.link.stats()["lanes_opened"] == 1  # the control lane never broke
        assert a.link.stats()["bytes_sent"] < 6 * 2_300_000 + 3 * num_lanes * 2_000_000


@plain_and_tls
async def test_all_lanes_reset_at_once(tls):
    async with served(tls=tls, num_lanes=4) as (a, b):
        a.open_view()
        b.open_view()
        payloads = _payloads(6)
        for payload in payloads:
            a.offer(payload)
        await _bulk_lane(a)
        await _reach(b, 3_000_000)
        for lane in list(a.link.lanes.all):
            lane.carrier.abort()
        await a.until(lambda: len(a.acked) == 6)
        assert b.delivered == payloads
        assert b.link.stats()["lanes_opened"] == 2


async def test_the_number_of_lanes_configured_is_dialled_and_kept(caplog):
    caplog.set_level(logging.INFO, "geotrain")
    async with served(num_lanes=3) as (a, b):
        await _lanes_there(a, b, 3)
        next(iter(b.link.lanes.bulk.open.values())).carrier.abort()
        async with asyncio.timeout(DEADLINE_S):
            while a.link.stats()["bulk_lanes_opened"] < 4:
                await asyncio.sleep(0)
        await _lanes_there(a, b, 3)
        rows = a.link.stats()["lanes"]
        assert [row["lane"] for row in rows] == sorted(row["lane"] for row in rows)
    told = [record.message for record in caplog.records if "goes over" in record.message]
    assert any("lane 1" in line and "2 other lanes" in line for line in told)
    assert any("dialled again" in line for line in told)


async def _lanes_there(a: Site, b: Site, number: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not all(len(site.link.stats()["lanes"]) == number for site in (a, b)):
            await asyncio.sleep(0)


async def test_fewer_lanes_are_wanted_and_nothing_is_lost():
    async with served() as (a, b):
        a.open_view()
        b.open_view()
        a.link.lanes.bulk.want(4)
        await _lanes_there(a, b, 4)
        payloads = _payloads(6)
        for payload in payloads:
            a.offer(payload)
            b.offer(payload)
        await _reach(b, 1_000_000)
        a.link.lanes.bulk.want(1)
        for site in (a, b):
            await site.until(lambda site=site: len(site.acked) == len(site.delivered) == 6)
            assert site.delivered == payloads
        # Under BBR two take turns where one would do (turns.py).
        await _lanes_there(a, b, 2 if a.link.stats()["congestion"] == "bbr" else 1)


async def test_lanes_under_bbr_take_turns_and_one_goes_on_alone():
    if choose_on_this_machine("auto").name != "bbr":
        pytest.skip("this machine lets no connection have BBR")
    async with served() as (a, b):
        a.open_view()
        b.open_view()
        await _lanes_there(a, b, 2)
        a.offer(b"before a tensor")
        await a.until(lambda: len(a.acked) == 1)
        async with asyncio.timeout(DEADLINE_S):
            while a.link.stats()["lane_in_turn"] is None:
                a.offer(_payloads(1)[0])
                await a.until(lambda: len(a.acked) == a.num_offered)
        number = a.link.stats()["lane_in_turn"]
        (resting,) = {row["lane"]: row for row in a.link.stats()["lanes"] if row["lane"] != number}
        before = a.link.stats()["lanes"]
        payloads = _payloads(6)
        for payload in payloads:
            a.offer(payload)
        await _reach(b, b.link.stats()["bytes_received"] + 2_000_000)
        now = {row["lane"]: row["bytes_sent"] for row in a.link.stats()["lanes"]}
        rested = {row["lane"]: row["bytes_sent"] for row in before}[resting]
        assert now[resting] - rested < 10_000  # pings and answers
        a.link.lanes.bulk.open[number].carrier.abort()
        await a.until(lambda: len(a.acked) == a.num_offered)
        assert b.delivered[-6:] == payloads


async def test_the_side_that_cannot_dial_has_its_wish_heard():
    async with served() as (a, b):
        await b.until(lambda: b.state == "connected")
        b.link.lanes.want(3)
        await _lanes_there(a, b, 3)


async def test_bulk_goes_over_the_control_lane_where_no_other_can_be_had(monkeypatch):
    monkeypatch.setattr(bulk_lanes, "GRACE_S", 0.2)
    dials = 0

    @asynccontextmanager
    async def dial():
        nonlocal dials
        dials += 1
        if dials > 1:
            raise DialError("one connection is all there is")
        near, far = carrier_pair(automatic=True)
        b.link.accept(far)
        yield near
        near.abort()

    a, b = Site("a", dial=dial), Site("b")
    async with running(a, b):
        a.open_view()
        b.open_view()
        payload = _payloads(1)[0]
        a.offer(payload)
        b.offer(payload)
        for site in (a, b):
            await site.until(lambda site=site: site.acked == [0])
            assert site.delivered == [payload]


async def test_bulk_lane_of_another_control_lane_is_turned_away():
    async with served() as (_a, b):
        await _bulk_lane(b)
        near, far = carrier_pair(automatic=True)
        stranger = LaneProtocol(
            hello=make_hello("a"),
            dialled=True,
            session=Session(),
            board=list,
            settings=LinkSettings(),
            rtt=RttEstimator(),
            now=0.0,
            join=Join(boot=1, epoch=99, lane=7),
        )
        ended = asyncio.Event()
        near.start(_Stranger(stranger, ended))
        b.link.accept(far)
        near.write(stranger.next_control())
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        assert stranger.close_reason == "closed by the other side: its control lane is gone"
        assert b.state == "connected"


class _Stranger:
    def __init__(self, protocol: LaneProtocol, ended: asyncio.Event) -> None:
        self._protocol, self._ended = protocol, ended

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._protocol.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.buffer_updated(nbytes, now=0.0)

    def connection_lost(self, reason: str) -> None:
        self._ended.set()


async def test_held_messages_survive_a_reset_and_are_released_afterwards():
    async with served() as (a, b):
        a.open_view()
        b.open_view()
        b.hold = True
        payloads = _payloads(2)
        for payload in payloads:
            a.offer(payload)
        await b.until(lambda: len(b.delivered) == 2)
        a.link.lanes.control.carrier.abort()
        b.link.release(0, VIEW, [1])
        await a.until(lambda: a.acked == [1])
        b.link.release(0, VIEW, [0])
        await a.until(lambda: a.acked == [1, 0])
        assert b.delivered == payloads


def _num_control(site: Site) -> int:
    return sum(lane.protocol.lane == 0 for lane in site.link.lanes.all)


@plain_and_tls
async def test_both_sides_dialling_end_with_one_lane(tls):
    async with served(tls=tls, both_dial=True) as (a, b):
        a.open_view()
        b.open_view()
        a.offer(b"one")
        b.offer(b"two")
        for site in (a, b):
            await site.until(lambda site=site: site.acked == [0] and site.state == "connected")
        async with asyncio.timeout(DEADLINE_S):
            while _num_control(a) != 1 or _num_control(b) != 1:
                await asyncio.sleep(0)
        assert a.delivered == [b"two"] and b.delivered == [b"one"]


@plain_and_tls
async def test_different_run_is_refused_on_both_sides_and_tried_again_slowly(caplog, tls):
    async with served(tls=tls, dialler_changes={"run": {**RUN, "seed": 5}}) as (a, b):
        for site in (a, b):
            await site.until(lambda site=site: site.state == "refused")
        # Found by the one who was dialled; both say the same.
        for site in (a, b):
            assert site.link.stats()["reason"] == "run.seed is 0 in b, 5 in a"
    lines = [record.message for record in caplog.records if "refused" in record.message]
    assert len(lines) == 2


async def test_boards_are_exchanged_at_once_and_changes_follow():
    async with served() as (a, b):
        await a.until(lambda: a.boards == [Presence(region="b", revision=1)])
        await b.until(lambda: b.boards == [Presence(region="a", revision=1)])
        a.link.publish(Presence(region="a", revision=2))
        await b.until(lambda: b.boards[-1] == Presence(region="a", revision=2))


async def test_close_tells_the_peer_why():
    async with served() as (a, b):
        await b.until(lambda: b.state == "connected")
        await a.link.close("its daemon ends: ended by SIGTERM")
        await b.until(lambda: b.state == "down")
        reason = "closed by the other side: its daemon ends: ended by SIGTERM"
        assert b.link.stats()["reason"] == reason


@pytest.mark.parametrize(("state", "level"), [("left", "INFO"), ("ready", "WARNING")])
async def test_the_end_of_a_peer_whose_rank_has_left_is_no_warning(caplog, state, level):
    caplog.set_level(logging.INFO, logger="geotrain")
    async with served() as (a, b):
        await b.until(lambda: b.state == "connected")
        b.board = [*b.board, Presence(region="a", incarnation=1, state=state)]
        await a.link.close("its daemon ends: its training process is done")
        await b.until(lambda: b.state == "down")
    lines = [one for one in caplog.records if one.message.startswith("x link to a: closed by")]
    assert [one.levelname for one in lines] == [level]


@pytest.mark.parametrize("from_end", [0, 1])
@plain_and_tls
async def test_close_tells_the_peer_why_in_the_midst_of_its_sending(from_end, tls):
    """A socket closed with bytes unread is reset, and a reset drops what the peer has not read."""
    async with served(tls=tls) as sites:
        closes, other = sites[from_end], sites[1 - from_end]
        for site in sites:
            site.open_view()
        for payload in _payloads(2):
            other.offer(payload)
        await _reach(closes, 500_000)
        closes.link.publish(Presence(region=closes.hello.region, revision=9))
        await closes.link.close("region is done")
        await other.until(lambda: other.state == "down")
        assert other.link.stats()["reason"].endswith("region is done")
        assert other.boards[-1].revision == 9


@plain_and_tls
async def test_closed_view_leaves_the_memory_alone(tls):
    async with served(tls=tls) as (a, b):
        a.open_view()
        b.open_view()
        for payload in _payloads(2):
            a.offer(payload, hints=((0, 3_000_000),))
        await _reach(b, 1_000_000)
        b.link.close_view()
        b.ring[:] = bytes(RING_BYTES)
        received = b.link.stats()["bytes_received"]
        await _reach(b, received + 1)
        a.link.close_view()
        a.link.publish(Presence(region="a", revision=2))
        await b.until(lambda: b.boards[-1] == Presence(region="a", revision=2))
        assert b.ring == bytes(RING_BYTES)
        assert b.delivered == [] and b.state == "connected"


async def test_coder_that_damages_is_overruled_by_raw_chunks():
    class Damaging(ZlibCoder):
        def encode(self, raw: memoryview) -> bytes | None:
            return zlib.compress(bytes(len(raw)), 1)

    async with served(coder=Damaging()) as (a, b):
        a.open_view()
        b.open_view()
        payload = _payloads(1)[0]
        a.offer(payload, hints=((0, 3_000_000),))
        await a.until(lambda: a.acked == [0])
        assert b.delivered == [payload]


@asynccontextmanager
async def in_memory(coder=None, num_lanes=None):
    """Two sites over fake carriers; `cuts` breaks the present one."""
    sites: dict[str, Site] = {}
    carriers: list = []

    @asynccontextmanager
    async def dial():
        near, far = carrier_pair(automatic=True)
        carriers.append(near)
        sites["b"].link.accept(far)
        yield near
        near.abort()

    sites["a"] = Site("a", dial=dial, coder=coder, num_lanes=num_lanes)
    sites["b"] = Site("b", coder=coder)
    async with running(sites["a"], sites["b"]):
        yield sites["a"], sites["b"], carriers


async def test_link_runs_over_any_carrier_and_survives_cuts():
    async with in_memory() as (a, b, carriers):
        a.open_view()
        b.open_view()
        for number in range(5):
            a.offer(_payloads(1)[0])
            await b.until(lambda number=number: len(b.delivered) == number + 1)
            carriers[-1].cut("reset")
        await a.until(lambda: len(a.acked) == 5)
        assert b.delivered == _payloads(1) * 5


async def test_silent_peer_is_given_up_and_dialled_again():
    async with in_memory() as (a, _, carriers):
        await a.until(lambda: a.state == "connected")
        carriers[0].pause_reading()  # nothing reaches a any more
        await a.until(lambda: a.state == "down")
        assert "ping timeout" in a.link.stats()["reason"]
        await a.until(lambda: a.state == "connected")
        assert a.link.stats()["lanes_opened"] == 2


async def test_bulk_lane_that_goes_silent_is_given_up_and_its_chunks_go_over_the_other():
    async with in_memory(num_lanes=2) as (a, b, carriers):
        await _lanes_there(a, b, 2)
        a.open_view()
        b.open_view()
        carriers[1].pause_reading()  # of this lane nothing reaches a any more
        payloads = _payloads(4)
        for payload in payloads:
            b.offer(payload)
        await b.until(lambda: len(b.acked) == 4)
        assert a.delivered == payloads
        await _lanes_there(a, b, 2)
        assert a.link.stats()["lanes_opened"] == 1 and a.link.stats()["bulk_lanes_opened"] == 3


async def test_chunks_read_ahead_behind_one_that_is_held_wait_with_it():
    async with in_memory(num_lanes=1) as (a, b, carriers):
        await _lanes_there(a, b, 1)
        a.open_view()
        b.open_view()
        await a.until(lambda: a.link.lanes.bulk.open[1].protocol.carries_chunks)
        control = carriers[0]._other
        control.pause_reading()  # the messages' headers do not reach b
        payloads = [bytes([number]) * 3000 for number in range(40)]
        for payload in payloads:
            a.offer(payload)
        bulk = b.link.lanes.bulk.open[1]
        async with asyncio.timeout(DEADLINE_S):
            while not (bulk.protocol.held and bulk._left):
                await asyncio.sleep(0)
        control.resume_reading()
        await a.until(lambda: len(a.acked) == 40)
        assert b.delivered == payloads


async def test_lane_that_takes_no_chunks_is_not_asked_over_and_over():
    async with in_memory(num_lanes=2) as (a, b, _):
        await _lanes_there(a, b, 2)
        a.open_view()
        b.open_view()
        lanes = list(a.link.lanes.bulk.open.values())
        for lane in lanes:
            lane.protocol.retiring = True  # no lane takes what is offered now
        a.offer(_payloads(1)[0])
        async with asyncio.timeout(DEADLINE_S):
            while not a.link.lanes.feed.has_any:
                await asyncio.sleep(0)
        turns_at_rest = 0
        for _ in range(50):
            await asyncio.sleep(0)
            turns_at_rest += not any(lane._pump_scheduled for lane in lanes)
        assert turns_at_rest > 0
        for lane in lanes:
            lane.protocol.retiring = False
            lane.wake()
        await a.until(lambda: a.acked == [0])


async def test_pings_are_frequent_only_while_there_is_bulk(monkeypatch):
    monkeypatch.setattr(rate_control, "IDLE_S", 0.3)
    async with served() as (a, b):
        a.open_view()
        b.open_view()
        await a.until(lambda: a.state == "connected")
        for payload in _payloads(4):
            a.offer(payload)
        pings = a.link.lanes.control.protocol.pings
        ordinary_s = pings.interval_s
        seen = set()
        async with asyncio.timeout(DEADLINE_S):
            while len(a.acked) < 4 or pings.interval_s != ordinary_s:
                seen.add(pings.interval_s)
                await asyncio.sleep(0)
        assert BUSY_INTERVAL_S in seen


async def test_failing_dials_are_reported_once_per_reason(caplog):
    caplog.set_level(logging.INFO, "geotrain")
    reasons = iter(["refused", "refused", "refused", "timed out"])

    @asynccontextmanager
    async def dial():
        raise DialError(next(reasons, "last"))
        yield  # a context manager needs one

    site = Site("a", dial=dial)
    async with running(site):
        await site.until(lambda: len(site.states) == 2)
    lines = [record.message for record in caplog.records]
    waiting = "= link to b: not there yet, trying again:"
    assert lines[:2] == [f"{waiting} refused", f"{waiting} timed out"]


async def test_what_somebody_must_mend_is_a_warning_at_once(caplog):
    caplog.set_level(logging.INFO, logger="geotrain.transport.link_state")

    @asynccontextmanager
    async def dial():
        raise DialError("its certificate has expired; renew it", is_lasting=True)
        yield  # a context manager needs one

    site = Site("a", dial=dial)
    async with running(site):
        await site.until(lambda: len(site.states) == 1)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == "! link to b: its certificate has expired; renew it"


async def test_view_that_cannot_resume_fails_by_name():
    async with in_memory() as (a, b, carriers):
        a.open_view()
        b.open_view()
        a.offer(b"x")
        await a.until(lambda: a.acked == [0])
        b.link.close_view()
        b.open_view()  # of the same name, and empty
        carriers[0].cut("reset")
        await a.until(lambda: a.failed)
        assert "lost the state" in a.failed[0]


async def test_accept_turns_away_a_crowd():
    site = Site("b")
    async with running(site):
        lost = []
        for _ in range(MAX_LANES + 2):
            near, far = carrier_pair(automatic=True)
            near.start(_Lost(lost))
            site.link.accept(far)
        assert len(lost) == 2


class _Lost:
    def __init__(self, lost: list) -> None:
        self._lost = lost

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(bytearray(1000))

    def buffer_updated(self, nbytes: int) -> None:
        pass

    def connection_lost(self, reason: str) -> None:
        self._lost.append(reason)


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9"])
def test_state_before_the_first_lane(url):
    stats = Site("a", url=url).link.stats()
    assert (stats["state"], stats["reason"]) == (
        ("down", "waiting for region b to dial in") if url is None else ("connecting", "")
    )


async def test_whoever_only_connects_gets_no_chunk_of_the_session():
    """A second connection of the same name, in its handshake, beside the lane that carries bulk."""
    async with in_memory() as (a, b, _):
        a.open_view()
        b.open_view()
        await a.until(lambda: a.state == "connected")
        stranger, far = carrier_pair(automatic=True)
        heard: list[bytes] = []
        stranger.start(_Heard(heard))
        payloads = _payloads(2)
        for payload in payloads:
            a.offer(payload)
        a.link.accept(far)
        await a.until(lambda: len(a.acked) == 2)
        assert b.delivered == payloads
        assert heard == []


class _Heard:
    def __init__(self, heard: list[bytes]) -> None:
        self._heard = heard
        self._buffer = bytearray(65536)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self._heard.append(bytes(self._buffer[:nbytes]))

    def connection_lost(self, reason: str) -> None:
        pass
