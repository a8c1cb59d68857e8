"""Asking daemons and a lab, all real, of which some do not answer."""

import asyncio
import contextlib
import json
import socket

import pytest

from geotrain.lab.demo.feed import Feed
from geotrain.lab.demo.options import Options
from geotrain.lab.demo.state import RunState
from geotrain.lab.settings import LinkSettings
from geotrain.lab.wan import open_wan
from tests.lab.demo.running import status_record

OPTIONS = Options(regions=3)
LIMIT_S = 30.0


@pytest.fixture
def wan():
    with open_wan("relay", sites=OPTIONS.names, link=LinkSettings()) as opened:
        yield opened


@contextlib.asynccontextmanager
async def page(body):
    """The address of a server that answers every request with this body."""
    handlers = set()

    async def answer(reader, writer):
        handlers.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + body)
            writer.close()
            await writer.wait_closed()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield address_of(server.sockets[0])
    await asyncio.gather(*handlers)


def address_of(sock):
    return f"127.0.0.1:{sock.getsockname()[1]}"


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0)


async def test_one_that_never_answers_holds_up_nobody(wan):
    state = RunState(OPTIONS, started_at=0.0)
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    answer = json.dumps(status_record(1, options=OPTIONS)).encode()
    with silent:
        async with page(answer) as told, page(b"<html>") as broken:
            # Its limit lies beyond the test's own.
            feed = Feed(state, wan, [address_of(silent), told, broken], answer_limit_s=2 * LIMIT_S)
            running = asyncio.create_task(feed.run(interval_s=0.01))
            await until(lambda: state.regions[1].status is not None)
            state.regions[1].status = None
            wan.set(rtt_s=0.01, why="a detour")
            await until(lambda: state.regions[1].status is not None and state.changes.all)
            assert state.regions[0].status is state.regions[2].status is None
            assert "a detour" in str(state.changes.all[0])
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_who_is_gone_or_silent_is_left_out_after_the_limit(wan):
    state = RunState(OPTIONS, started_at=0.0)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        gone_address = address_of(gone)
    answer = json.dumps(status_record(2, options=OPTIONS)).encode()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with page(answer) as told:
            addresses = [gone_address, address_of(silent), told]
            feed = Feed(state, wan, addresses, answer_limit_s=1.0)
            await feed.ask_all()
            wan.close()
            await feed.ask_all()  # nor does it matter that the lab has ended
    assert [region.status is not None for region in state.regions] == [False, False, True]
