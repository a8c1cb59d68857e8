"""Structure-aware fuzzing of everything that reads a peer's bytes.

`make test` runs a fixed number of cases, the same ones each time; `make fuzz` goes on for
FUZZ_SECONDS (3600) with new ones. A case that fails is named, and runs again alone with
FUZZ_CASE=number python -m pytest tests/fuzz -k target.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from random import Random

import pytest

from geotrain.transport.http import FROM_HEADER, PATH, TO_HEADER, UPGRADE, LinkServer
from tests.fuzz.mutate import mutate_bytes, split
from tests.fuzz.targets import TARGETS, case

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
CASE = os.environ.get("FUZZ_CASE")
NUM_CASES = {"header": 10_000, "record": 4_000, "attachment": 2_000, "reader": 3_000, "lane": 1_000}
NUM_REQUESTS = 60
LIMIT_S = 20.0
pytestmark = pytest.mark.timeout(SECONDS + 180)


def numbers(count: int) -> Iterator[int]:
    """Of the cases to run."""
    if CASE is not None:
        yield int(CASE)
    elif SECONDS:
        deadline = time.monotonic() + SECONDS / (len(TARGETS) + 1)
        number = time.time_ns()
        while time.monotonic() < deadline:
            yield number
            number += 1
    else:
        yield from range(count)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_no_input_does_harm(target):
    ran = 0
    for number in numbers(NUM_CASES[target.__name__]):
        try:
            case(target, number)
        except Exception as error:
            raise AssertionError(f"FUZZ_CASE={number} of {target.__name__}: {error!r}") from error
        ran += 1
    assert ran > 0


_UPGRADE = (
    f"GET {PATH} HTTP/1.1\r\nHost: b\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
    f"{FROM_HEADER}: a\r\n{TO_HEADER}: b\r\n\r\n"
).encode()
_WORDS = (b"\r\n", b": ", UPGRADE.encode(), b"Upgrade", b"GET", b"HTTP/1.1", PATH.encode(), b"a")
_STRANGE = (b"", b"\x00", b"\xff" * 9, b"x" * 9_000, b"\r\n" * 3, b"Content-Length: 99\r\n", b"b")


def request(rng: Random) -> bytes:
    """An upgrade with a word of it replaced, or with bytes of it changed."""
    data = _UPGRADE
    for _ in range(rng.choice((1, 2, 4))):
        if rng.random() < 0.6:
            data = data.replace(rng.choice(_WORDS), rng.choice(_STRANGE), rng.choice((1, -1)))
        else:
            data = mutate_bytes(data, rng)
    return data


class Closing:
    """A link that closes whatever comes: what is fuzzed is the way there."""

    def accept(self, carrier) -> None:
        carrier.close()


async def test_no_request_does_harm(caplog):
    """Over real sockets: each is answered or closed, and a right one is served afterwards."""
    caplog.set_level(logging.WARNING)
    server = LinkServer()
    await server.start("127.0.0.1", 0, {"a": Closing()}.get)
    try:
        for number in numbers(NUM_REQUESTS):
            rng = Random(f"request {number}")
            await _ask(server.port, split(request(rng), rng), then_end=True)
            assert not caplog.records, f"FUZZ_CASE={number}: {caplog.text}"
        answer = await _ask(server.port, [_UPGRADE], then_end=False)
        assert answer.startswith(b"HTTP/1.1 101 ")
    finally:
        await server.close()


async def _ask(port: int, pieces: list[bytes], *, then_end: bool) -> bytes:
    """What it answers until it closes; the end of half a request must not be waited for."""
    async with asyncio.timeout(LIMIT_S):
        stream, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if then_end:
                writer.write_eof()
            return await stream.read()
        except OSError:
            return b""
        finally:
            writer.transport.abort()
