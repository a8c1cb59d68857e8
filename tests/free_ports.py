"""Ports for what is told of a port before it listens there, or listens there again once killed."""

import contextlib
import itertools
import os
import re
import socket
from random import Random

_PORTS = range(12_000, 30_000)
"""Below those that Linux and macOS give out by themselves, from 32768 and 49152 on: another test's
connection would get one of them just when nobody listens there."""
_MOST_WORKERS = 16
"""Each has a part of them for itself: two that look at once would find the same port free."""


def _own_ports() -> "itertools.cycle[int]":
    worker = re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or "0"
    own = _PORTS[int(worker) % _MOST_WORKERS :: _MOST_WORKERS]
    start = Random(os.urandom(8)).randrange(len(own))  # another run of the tests is elsewhere
    return itertools.cycle([*own[start:], *own[:start]])


_next_ports = _own_ports()


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now and that no other test is given, all different."""
    found: list[int] = []
    for port in itertools.islice(_next_ports, len(_PORTS) // _MOST_WORKERS):
        if len(found) == count:
            break
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            found.append(port)
    assert len(found) == count, f"no {count} ports of {_PORTS} are free"
    return found
