"""The socket of a rank's attachment and the one thread that serves it.

`post` tries the socket on the caller's thread and never waits: what does not fit goes to the I/O
thread, which also reads, and beats once a second whatever the training thread does.
"""

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from geotrain.errors import AttachError
from geotrain.transport.records import RecordReader, encode_record

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 1.0
_RECV_BYTES = 256 * 1024


class AttachmentIO:
    """Reads and writes records until either side closes.

    `on_records` and `on_gone` are called on the I/O thread, without the lock.
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
    ) -> None:
        self.gone: str | None = None
        """Why nothing can be sent any more."""
        self._socket = sock
        self._reader = reader
        self._lock = lock
        self._daemon = daemon
        self._on_records = on_records
        self._on_gone = on_gone
        self._beat = beat
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
            AttachError: The daemon is gone.
        """
        data: bytes | memoryview = encode_record(record)
        with self._lock:
            if self.gone is not None:
                raise AttachError(self.gone)
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
            self._serve()
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

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self._send_beat()
                next_beat = now + BEAT_INTERVAL_S
            with self._lock:
                if self._close_by is not None and (not self._unsent or now >= self._close_by):
                    return
                wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            poller.register(self._socket, wanted)
            for fd, events in poller.poll((next_beat - now) * 1000 + 1):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif not self._serve_socket(events):
                    return

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
