"""The daemon's end of one attachment: the socket of one rank, its arena, its process.

Lives on the event loop and never blocks it. Ends once, with a reason: the rank closed its socket or
its process ended, a record was garbage, or the rank stopped reading. `on_closed` says which.
"""

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from geotrain.transport.arena import IN, OUT, Arena
from geotrain.transport.exit_status import exit_status_of
from geotrain.transport.records import AttachRequest, RecordReader, encode_record

ATTACH_TIMEOUT_S = 10.0
"""A connection that has not said who it is by then is closed."""
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""What a rank that does not read may make the daemon hold; credits keep it far below."""
_RECV_BYTES = 256 * 1024
_MAX_READS = 16
_EXIT_WAIT_S = 0.1
"""Between the end of a process's sockets and its own."""
_POPULATE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """How an attachment ended."""

    reason: str
    garbled: bool = False
    """The rank broke the protocol; otherwise its end of the socket or its process is gone."""


class AttachmentOwner(Protocol):
    """What the daemon does with the records of a rank."""

    def on_attach(self, server: "AttachmentServer", request: AttachRequest) -> str | None:
        """Returns why the rank is refused; or None, having posted `attached`."""

    def on_record(self, server: "AttachmentServer", record: dict[str, Any]) -> None:
        """Raises ValueError where the record makes no sense."""

    def on_closed(self, server: "AttachmentServer", closed: Closed) -> None:
        """Called once, for a rank that had been accepted; the arena is unmapped right after."""


class AttachmentServer:
    """Owns an accepted connection from now on; `request` and `arena` are there once attached."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, owner: AttachmentOwner
    ) -> None:
        self.request: AttachRequest | None = None
        self.arena: Arena | None = None
        self.closed: Closed | None = None
        self.pid = _peer_pid(sock)
        self._loop = loop
        self._socket = sock
        self._owner = owner
        self._reader = RecordReader()
        self._accepted = False
        self._fds: list[int] = []
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._pidfd = -1
        sock.setblocking(False)
        loop.add_reader(sock, self._on_readable)
        self._timeout = loop.call_later(
            ATTACH_TIMEOUT_S, self.close, Closed(reason="it did not say who it is")
        )

    def post(self, record: Mapping[str, Any]) -> None:
        """Send one record, in order; silently nothing once closed."""
        if self.closed is not None:
            return
        data = encode_record(record)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if len(self._unsent) == 1:
            self._on_writable()
        elif self._unsent_bytes > MAX_UNSENT_BYTES:
            self.close(Closed(reason="it stopped reading"))

    @property
    def is_blocked(self) -> bool:
        """Whether the rank has yet to read what was sent before."""
        return bool(self._unsent)

    def ring(self, stream: int, direction: str) -> memoryview | None:
        """The memory of one ring of the rank."""
        if self.request is None or self.arena is None:
            return None
        span = self.request.rings.get((stream, direction))
        return None if span is None else self.arena.view(*span)

    def in_capacities(self) -> dict[int, int]:
        """Stream -> capacity of the rank's in-ring, in bytes."""
        rings = self.request.rings if self.request is not None else {}
        return {stream: size for (stream, where), (_, size) in rings.items() if where == IN}

    def slot(self, stream: int, start: int, payload_bytes: int) -> memoryview:
        """The payload of a message that the rank sends.

        Raises:
            ValueError: The rank has no such ring, or the slot is not inside it.
        """
        ring = self.ring(stream, OUT)
        if ring is None or not 0 <= start <= start + payload_bytes <= len(ring):
            raise ValueError(f"a slot outside the out-ring of stream {stream}")
        return ring[start : start + payload_bytes]

    def check_alive(self) -> None:
        """Notice now, rather than at the loop's next turn, that the rank has gone."""
        if self.closed is None:
            self._on_readable()

    def exit_status(self) -> int | None:
        """How the process ended, -n for signal n; None if it lives, or nobody tells.

        For `on_closed`, of a rank that is lost: it may take `_EXIT_WAIT_S` on the loop.
        """
        if self._pidfd < 0:
            return None
        return exit_status_of(self.pid, self._pidfd, wait_s=_EXIT_WAIT_S)

    def close(self, closed: Closed) -> None:
        """End the attachment; the rank sees its socket close."""
        if self.closed is not None:
            return
        self.closed = closed
        self._timeout.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
        self._close_fds()
        self._unsent.clear()
        if self._accepted:
            self._owner.on_closed(self, closed)
        if self._pidfd >= 0:
            os.close(self._pidfd)
        if self.arena is not None:
            # Unmapping a large arena takes longer than the loop may stand still.
            self._loop.run_in_executor(None, self.arena.close)

    def _on_readable(self) -> None:
        try:
            # Bounded, so that a rank that floods us does not keep the loop from the links.
            for _ in range(_MAX_READS):
                data, fds, _, _ = socket.recv_fds(self._socket, _RECV_BYTES, 4)
                self._fds += fds
                if not data:
                    self.close(Closed(reason="its socket closed"))
                    return
                for record in self._reader.feed(data):
                    self._on_record(record)
                    if self.closed is not None:
                        return
                self._close_fds()
        except BlockingIOError:
            return
        except ValueError as exc:
            reason = f"it sent a bad record: {exc}"
            self.post({"type": "refused", "reason": f"the daemon closed this attachment: {reason}"})
            self.close(Closed(reason=reason, garbled=True))
        except OSError:
            # ECONNRESET: it closed without having read everything.
            self.close(Closed(reason="its socket closed"))

    def _on_record(self, record: dict[str, Any]) -> None:
        if self._accepted:
            self._owner.on_record(self, record)
            return
        try:
            request = AttachRequest.from_record(record)
            if len(self._fds) != 1:
                raise ValueError(f"{len(self._fds)} descriptors came with the attach record, not 1")
            arena = Arena.adopt(self._fds.pop(), request.arena_bytes)
        except ValueError as exc:
            self._refuse(str(exc))
            return
        self.request, self.arena = request, arena
        reason = self._owner.on_attach(self, request)
        if reason is not None:
            self._refuse(reason)
            return
        self._accepted = True
        self._populate(0)
        self._timeout.cancel()
        self._watch_process()

    def _refuse(self, reason: str) -> None:
        self.post({"type": "refused", "reason": reason})
        self.close(Closed(reason=reason))

    def _populate(self, offset: int) -> None:
        # All at once it would hold up the loop, and page by page memory would seem to grow for
        # as long as it takes a ring to come round.
        if self.arena is not None and self.closed is None and offset < self.arena.size:
            self.arena.populate(offset, _POPULATE_BYTES)
            self._loop.call_soon(self._populate, offset + _POPULATE_BYTES)

    def _watch_process(self) -> None:
        # A forked child may hold the socket open after the rank's death; the pidfd does not lie.
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            return
        self._loop.add_reader(self._pidfd, self._on_process_ended)

    def _on_process_ended(self) -> None:
        # First what it said last, such as why it ended.
        while self.closed is None and _is_readable(self._socket):
            self._on_readable()
        self.close(Closed(reason="its process ended"))

    def _on_writable(self) -> None:
        try:
            while self._unsent:
                data = self._unsent[0]
                sent = self._socket.send(data, socket.MSG_NOSIGNAL)
                self._unsent_bytes -= sent
                if sent < len(data):
                    self._unsent[0] = memoryview(data)[sent:]
                else:
                    self._unsent.popleft()
            self._loop.remove_writer(self._socket)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._on_writable)
        except OSError:
            # The rank's last words may still be unread; the reader meets the end after them.
            self._unsent.clear()
            self._loop.remove_writer(self._socket)

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _peer_pid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def _is_readable(sock: socket.socket) -> bool:
    try:
        return len(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) > 0
    except OSError:
        return False
