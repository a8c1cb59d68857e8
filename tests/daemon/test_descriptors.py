"""A daemon without descriptors left says so, once, and serves on when there are some again."""

import asyncio
import contextlib
import logging
import resource
import socket
import subprocess
import sys

import pytest

from geotrain.daemon.descriptors import Shortage

LIMIT_S = 30.0
RAISED = """
import resource
from geotrain.daemon.descriptors import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))
raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize("hard", [100, 3_000])
def test_the_limit_is_raised_as_far_as_this_user_may(hard):
    command = [sys.executable, "-c", RAISED.format(hard=hard)]
    assert subprocess.check_output(command, text=True, timeout=LIMIT_S) == f"{hard}\n"


async def test_what_cannot_be_accepted_is_told_once_and_served_later(caplog):
    asyncio.get_running_loop().set_exception_handler(Shortage())
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket() for _ in range(3)]
    for each in waiting:
        each.setblocking(False)
    try:
        with socket.socket() as probe:
            # The lowest free number is the next one given: none is free below the limit.
            lowest = probe.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        with caplog.at_level(logging.ERROR, logger="geotrain.daemon.descriptors"):
            async with asyncio.timeout(LIMIT_S):
                for each in waiting:
                    with contextlib.suppress(BlockingIOError):
                        each.connect(address)
                while not caplog.records:
                    await asyncio.sleep(0.01)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for each in waiting:
                    assert await asyncio.get_running_loop().sock_recv(each, 1) == b""
        told = [each.message for each in caplog.records]
        assert len(told) == 1
        assert told[0].startswith("! nobody can connect: all ")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in waiting:
            each.close()
        server.close()
