"""The socket of a rank's attachment and the one thread that serves it.

`post` tries the socket on the caller's thread and never waits: what does not fit goes to the I/O
thread, which also reads, and beats once a second whatever the training thread does.

A daemon that ends without a word may come back. Until then there is an *outage*: what is posted
goes nowhere, because all that matters of it is told to the next daemon first of all.
"""

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from geotrain.errors import AttachError
from geotrain.transport.records import RecordReader, encode_record

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 1.0
_RECV_BYTES = 256 * 1024
_FIND_S = 0.25
"""At most as long `close` is not seen while the next daemon is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A connection to a daemon that took the place of the one that ended."""

    socket: socket.socket
    reader: RecordReader
    records: list[dict[str, Any]]
    """What it has said already."""


class AttachmentIO:
    """Reads and writes records until either side closes.

    `on_records`, `on_gone` and `find` are called on the I/O thread, without the lock; `resume`
    under it.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        reader: RecordReader,
        lock: threading.RLock,
        daemon: str,
        on_records: Callable[[list[dict[str, Any]]], None],
        on_gone: Callable[[], None],
        beat: Callable[[], Mapping[str, Any] | None],
        return_s: float,
        find: Callable[[float], Returned | None],
        resume: Callable[[], Iterable[Mapping[str, Any]]],
    ) -> None:
        """
        Args:
            return_s: How long a daemon that ended without a word may take to come back.
            find: Look for the next daemon, for as many seconds; None if there is none yet.
                Raises AttachError where there will be none.
            resume: What the next daemon is told first.
        """
        self.gone: str | None = None
        """Why nothing can be sent any more."""
        self.outage: str = ""
        """Why nothing can be sent at the moment; empty while all is well."""
        self._socket = sock
        self._reader = reader
        self._lock = lock
        self._daemon = daemon
        self._on_records = on_records
        self._on_gone = on_gone
        self._beat = beat
        self._return_s = return_s
        self._find = find
        self._resume = resume
        self._unsent: deque[bytes | memoryview] = deque()
        self._close_by: float | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="geotrain-attachment", daemon=True)
        sock.setblocking(False)

    def start(self) -> None:
        self._thread.start()

    def post(self, record: Mapping[str, Any]) -> None:
        """Send one record, now or as soon as the daemon reads.

        Raises:
            AttachError: The daemon is gone for good.
        """
        data: bytes | memoryview = encode_record(record)
        with self._lock:
            if self.gone is not None:
                raise AttachError(self.gone)
            if self.outage:
                return
            if not self._unsent:
                data = memoryview(data)[self._send_now(data) :]
                if not data:
                    return
            self._unsent.append(data)
            os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float) -> None:
        """Send what is left, for at most `timeout_s`, and end the thread."""
        with self._lock:
            if self.gone is None:
                self._close_by = time.monotonic() + timeout_s
                os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s + 1.0)

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist and the lock may be held for ever."""
        self.gone = "this process is a fork of the rank's"
        self._socket.close()
        os.close(self._wake)

    def _send_now(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            # The thread reads what the daemon said last, and then the end of the stream.
            return len(data)

    def _run(self) -> None:
        reason = f"{self._daemon} is gone; start it again, then this process"
        try:
            while not self._serve_until_lost() and self._come_back():
                pass
        except AttachError as exc:
            reason = str(exc)
        except ValueError as exc:
            reason = f"{self._daemon} sent a bad record: {exc}"
        except OSError as exc:
            reason = f"{self._daemon} is gone ({exc.strerror}); start it again, then this process"
        except Exception as exc:
            logger.exception("! the attachment's thread ended")
            reason = f"the attachment's thread ended: {exc!r}"
        finally:
            with self._lock:
                self.gone = reason if self._close_by is None else "the attachment is closed"
                self._socket.close()
                os.close(self._wake)
            self._on_gone()

    def _serve_until_lost(self) -> bool:
        """True where this side has closed, False where the daemon's side has."""
        try:
            return self._serve()
        except (ConnectionResetError, BrokenPipeError):  # it ended with records unread
            return False

    def _come_back(self) -> bool:
        """Wait for the next daemon and tell it everything. False: it took too long."""
        since = time.monotonic()
        with self._lock:
            self.outage = f"{self._daemon} is gone"
            self._unsent.clear()
            self._socket.close()
        self._on_gone()
        if self._return_s > 0:
            logger.warning(
                "! %s is gone without a word; waiting %.0f s at most until it is started again",
                self._daemon,
                self._return_s,
            )
        while (left_s := since + self._return_s - time.monotonic()) > 0:
            if self._close_by is not None:
                return False
            found = self._find(min(left_s, _FIND_S))
            if found is not None:
                self._take_up(found)
                away_s = time.monotonic() - since
                logger.info("= %s is back after %.1f s; nothing is lost", self._daemon, away_s)
                return True
        return False

    def _take_up(self, found: Returned) -> None:
        with self._lock:
            self._socket, self._reader = found.socket, found.reader
            self._socket.setblocking(False)
            # In one step with what others post: each of their records is either in here or after.
            self._unsent.extend(encode_record(record) for record in self._resume())
            self.outage = ""
        if found.records:
            self._on_records(found.records)

    def _serve(self) -> bool:
        """True once closed by this side, False at the end of the stream."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        next_beat = time.monotonic()
        sock = self._socket
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self._send_beat()
                next_beat = now + BEAT_INTERVAL_S
            with self._lock:
                if self._close_by is not None and (not self._unsent or now >= self._close_by):
                    return True
                wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            poller.register(sock, wanted)
            for fd, events in poller.poll((next_beat - now) * 1000 + 1):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif not self._serve_socket(events):
                    return False

    def _serve_socket(self, events: int) -> bool:
        """False at the end of the stream."""
        if events & select.POLLOUT:
            self._flush()
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            data = self._socket.recv(_RECV_BYTES)
            if not data:
                return False
            records = self._reader.feed(data)
            if records:
                self._on_records(records)
        return True

    def _flush(self) -> None:
        with self._lock:
            while self._unsent:
                data = self._unsent[0]
                sent = self._send_now(data)
                if sent < len(data):
                    self._unsent[0] = memoryview(data)[sent:]
                    return
                self._unsent.popleft()

    def _send_beat(self) -> None:
        record = self._beat()
        if record is not None:
            self.post(record)
