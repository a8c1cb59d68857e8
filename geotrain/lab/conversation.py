"""Talking to a lab's keeper: one question, one answer, a JSON object a line each."""

import contextlib
import json
import os
import select
import socket
import subprocess
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from geotrain.errors import ConfigError
from geotrain.lab.emulator.sites import LabFailedError

OPEN_LIMIT_S = 30.0
_ANSWER_LIMIT_S = 20.0


def socket_name(name: str) -> str:
    """The abstract socket of a named lab of this user, in this network namespace."""
    return f"\0geotrain-lab/{os.getuid()}/{name}"


class Conversation:
    """Used from any thread; `keeper` is the process where it is our own child."""

    def __init__(self, sock: socket.socket, keeper: "subprocess.Popen[bytes] | None") -> None:
        self._sock = sock
        self._lines = sock.makefile("rb")
        self._keeper = keeper
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise LabFailedError("the lab was closed")
            with contextlib.suppress(BrokenPipeError):  # its last words are still to be read
                self._sock.sendall(json.dumps(request).encode() + b"\n")
            return self.answer(timeout_s=_ANSWER_LIMIT_S)

    def answer(self, *, timeout_s: float) -> dict[str, Any]:
        """Raises ConfigError or LabFailedError as the keeper said, or where it says nothing."""
        self._sock.settimeout(timeout_s)
        try:
            text = self._lines.readline()
        except TimeoutError as error:
            raise LabFailedError(f"the lab did not answer within {timeout_s:g} s") from error
        except ConnectionError:
            text = b""
        if not text:
            raise LabFailedError("the lab has ended without a word")
        reply: dict[str, Any] = json.loads(text)
        if "error" in reply:
            kind = ConfigError if reply.get("config") else LabFailedError
            raise kind(reply["error"])
        return reply

    def close(self, keeper_pid: int) -> None:
        """End the lab; returns when its keeper has ended."""
        if self._closed:
            return
        with contextlib.suppress(LabFailedError):
            if self._keeper is not None:
                self.ask({"op": "close"})
            else:
                self._close_anothers(keeper_pid)
        self.abandon()

    def _close_anothers(self, keeper_pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(keeper_pid)
            try:
                self.ask({"op": "close"})
                select.select([handle], (), (), _ANSWER_LIMIT_S)
            finally:
                os.close(handle)

    def hang_up(self) -> None:
        self._closed = True
        self._lines.close()
        self._sock.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # that it still runs is intended
            self._keeper = None

    def abandon(self) -> None:
        """Hang up on our own keeper, which ends it, and wait until it has ended."""
        keeper = self._keeper
        if keeper is not None:
            self._sock.shutdown(socket.SHUT_RDWR)
            try:
                keeper.wait(_ANSWER_LIMIT_S)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait()
        self.hang_up()
