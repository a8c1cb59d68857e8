"""The ranks of this region: who may attach, what they say, whether they are alive."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from geotrain.daemon.liveness import RankLiveness
from geotrain.daemon.routing import Route
from geotrain.errors import RegionError
from geotrain.transport.arena import IN, OUT
from geotrain.transport.attachment_server import AttachmentServer, Closed
from geotrain.transport.maps import get_int, get_map, get_str
from geotrain.transport.messages import Message
from geotrain.transport.records import ATTACHMENT_PROTO, AttachRequest, get_counts, get_seconds
from geotrain.transport.restoring import Restored, Restoring

logger = logging.getLogger(__name__)

_MAX_CHARS = 2_000
"""Of a rank's texts that are shown or passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Whom this daemon serves; a rank that says otherwise is refused."""

    region: str
    run_hash: str
    version: str
    routes: tuple[Route, ...]
    silent_s: float


class RankEvents(Protocol):
    """What the daemon does about its rank. ValueError: the rank broke a rule."""

    def on_attached(self, rank: "Rank") -> None:
        """Answers with `attached`."""

    def on_returned(self, rank: "Rank", incarnation: int) -> str | None:
        """A rank of a daemon before this one. Answers with `attached`, or says why not."""

    def on_resumed(self, rank: "Rank", restored: Restored) -> None:
        """It has told all that it kept."""

    def on_ready(self, identity: Mapping[str, Any]) -> None: ...
    def on_send(self, rank: "Rank", message: Message) -> None: ...
    def on_release(self, rank: "Rank", stream: int, view: int, seqs: list[int]) -> None: ...
    def on_report(self, report: Mapping[str, Any]) -> None: ...
    def on_failed(self, error: RegionError) -> None: ...
    def on_left(self, reason: str) -> None: ...

    def on_detached(self, error: RegionError) -> bool:
        """The rank is gone and its memory about to go; `error` holds if it had not said why.

        Returns whether it was told on, and so logged.
        """


@dataclass(slots=True)
class Rank:
    """One attached rank."""

    server: AttachmentServer
    request: AttachRequest
    liveness: RankLiveness
    report: dict[str, Any] = field(default_factory=dict)
    state: str = "attached"
    restoring: Restoring | None = None
    """While it tells what it kept through the death of a daemon."""
    stacks: dict[int, asyncio.Future[str]] = field(default_factory=dict)


class Attachments:
    """Accepts ranks at the Unix socket and reads what they say."""

    def __init__(self, served: Served, events: RankEvents) -> None:
        self.ranks: dict[int, Rank] = {}
        self._served = served
        self._events = events
        self._servers: set[AttachmentServer] = set()
        self._num_questions = 0

    def listen(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        self._loop = loop
        self._listener = listener
        loop.add_reader(listener, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        for server in list(self._servers):
            server.close(Closed(reason="the daemon ended"))

    def post(self, record: Mapping[str, Any]) -> None:
        """Tell every attached rank."""
        for rank in self.ranks.values():
            rank.server.post(record)

    async def stacks(self, timeout_s: float) -> dict[int, str]:
        """Each rank's Python stacks, from its I/O thread; a frozen process has none to give."""
        asked = {number: self._ask_stacks(rank) for number, rank in self.ranks.items()}
        if asked:
            await asyncio.wait(asked.values(), timeout=timeout_s)
        silent = f"no answer within {timeout_s:g} s: the process is stopped or swapping"
        return {
            number: future.result() if future.done() and not future.cancelled() else silent
            for number, future in asked.items()
        }

    def _ask_stacks(self, rank: Rank) -> asyncio.Future[str]:
        self._num_questions += 1
        future = rank.stacks[self._num_questions] = self._loop.create_future()
        number = self._num_questions
        future.add_done_callback(lambda _: rank.stacks.pop(number, None))
        rank.server.post({"type": "stacks", "id": number})
        return future

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            logger.warning("! a rank could not be accepted: %s", exc.strerror)
            return
        self._servers = {server for server in self._servers if server.closed is None}
        self._servers.add(AttachmentServer(self._loop, sock, self))

    # AttachmentOwner

    def on_attach(self, server: AttachmentServer, request: AttachRequest) -> str | None:
        reason = refusal(self._served, request) or self._occupied(request.rank)
        if reason is not None:
            logger.warning("! refused a rank (pid %d): %s", server.pid, reason)
            return reason
        liveness = RankLiveness(silent_s=self._served.silent_s, now=time.monotonic())
        rank = Rank(server=server, request=request, liveness=liveness)
        # It joins `ranks` only afterwards: nothing may reach it ahead of `attached`.
        if request.resumes:
            reason = self._events.on_returned(rank, request.resumes)
            if reason is not None:
                logger.warning("! refused a rank (pid %d): %s", server.pid, reason)
                return reason
            rank.restoring = Restoring(self._served.region, request.resumes)
        else:
            self._events.on_attached(rank)
        self.ranks[request.rank] = rank
        how = "attached" if rank.restoring is None else "attached again"
        logger.info("= rank %d %s (pid %d)", request.rank, how, server.pid)
        return None

    def on_record(self, server: AttachmentServer, record: dict[str, Any]) -> None:
        rank = self._rank_of(server)
        if rank.restoring is not None:
            self._restore(rank, rank.restoring, record)
            return
        match record["type"]:
            case "send":
                message = Message.from_map(get_map(record, "message") or {}, with_start=True)
                self._events.on_send(rank, message)
            case "release":
                stream, view = get_int(record, "stream"), get_int(record, "view")
                self._events.on_release(rank, stream, view, get_counts(record, "seqs"))
            case "beat":
                rank.liveness.on_beat(
                    action=get_str(record, "action")[:_MAX_CHARS],
                    age_s=get_seconds(record, "age_s"),
                    step=get_int(record, "step"),
                    now=time.monotonic(),
                )
            case "report":
                rank.report = get_map(record, "report") or {}
                self._events.on_report(rank.report)
            case "ready":
                rank.state = "ready"
                self._events.on_ready(get_map(record, "identity") or {})
            case "fail":
                rank.state = "failed"
                self._events.on_failed(_shortened(get_map(record, "error") or {}))
            case "leave":
                rank.state = "left"
                self._events.on_left(get_str(record, "reason")[:_MAX_CHARS])
            case "stacks":
                self._on_stacks(rank, record)
            case other:
                raise ValueError(f"a record of type {other[:32]!r}")

    def _restore(self, rank: Rank, restoring: Restoring, record: dict[str, Any]) -> None:
        restored = restoring.take(record)
        if restored is not None:
            rank.restoring = None
            rank.state = restored.own.state
            self._events.on_resumed(rank, restored)

    def on_closed(self, server: AttachmentServer, closed: Closed) -> None:
        rank = self._rank_of(server)
        del self.ranks[rank.request.rank]
        for future in list(rank.stacks.values()):
            future.cancel()
        error = self._lost(rank, closed)
        was_told = self._events.on_detached(error)
        if not was_told and rank.state not in ("left", "failed"):
            logger.warning("! %s", error.detail)

    def _on_stacks(self, rank: Rank, record: Mapping[str, Any]) -> None:
        future = rank.stacks.get(get_int(record, "id"))
        if future is not None and not future.done():
            future.set_result(get_str(record, "text"))

    def _rank_of(self, server: AttachmentServer) -> Rank:
        return next(rank for rank in self.ranks.values() if rank.server is server)

    def _occupied(self, number: int) -> str | None:
        rank = self.ranks.get(number)
        if rank is not None:
            # It may be dead, and this the replacement, ahead of the news of the death.
            rank.server.check_alive()
            rank = self.ranks.get(number)
        if rank is None:
            return None
        return (
            f"rank {number} of region {self._served.region} is already attached "
            f"(pid {rank.server.pid}); end that process first"
        )

    def _lost(self, rank: Rank, closed: Closed) -> RegionError:
        number, pid = rank.request.rank, rank.server.pid
        if closed.garbled:
            detail = f"rank {number} (pid {pid}): {closed.reason}; it runs other code than ours?"
        else:
            status = None
            if rank.state not in ("left", "failed"):  # those have said why, and may live on
                status = rank.server.exit_status()
            age_s = rank.liveness.action_age_s(time.monotonic())
            detail = (
                f"rank {number} (pid {pid}) {ended_how(status, closed.reason)}; "
                f"last seen in {rank.liveness.action!r} for {age_s:.1f} s"
            )
        return RegionError(region=self._served.region, kind="lost", detail=detail)


def refusal(served: Served, request: AttachRequest) -> str | None:
    """Why this rank cannot attach here, with the remedy; None if it can."""
    if request.proto != ATTACHMENT_PROTO or request.version != served.version:
        return (
            f"the daemon runs geotrain {served.version} (attachment {ATTACHMENT_PROTO}), this "
            f"process {request.version} ({request.proto}); install the same version in both"
        )
    if request.region != served.region:
        return (
            f"this daemon serves region {served.region}, not {request.region}; "
            "use the config file of this region"
        )
    if request.run_hash != served.run_hash:
        return (
            f"[run] of this process is not the one that region {served.region}'s daemon started "
            "with; restart the daemon with the same config file"
        )
    if request.rank != 0 or request.world_size != 1:
        return (
            f"rank {request.rank} of {request.world_size}: this version serves one rank per "
            "region; start one process (torchrun --nproc-per-node 1)"
        )
    wanted = {(route.receives, IN) for route in served.routes}
    wanted |= {(route.sends, OUT) for route in served.routes}
    if set(request.rings) != wanted:
        return f"the arena has rings {_names(request.rings)}, this place needs {_names(wanted)}"
    return None


_HINTS = {
    signal.SIGKILL: "out of memory? the kernel's log tells",
    signal.SIGTERM: "its job was cancelled? to end in order, let a handler call request_stop()",
    signal.SIGHUP: "its terminal was closed?",
}


def ended_how(status: int | None, seen: str) -> str:
    """How a rank ended that did not say why.

    Args:
        status: Its exit status, -n for signal n; None where it is not known.
        seen: What was noticed of it.
    """
    if status is None:
        return f"ended without saying why ({seen}); whoever started it has its exit status"
    if status >= 0:
        return f"ended with exit status {status} without leaving the run (os._exit, or a library)"
    try:
        number = signal.Signals(-status)
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-status}"
    hint = _HINTS.get(number)
    return f"was ended by {number.name}" + (f" ({hint})" if hint else "")


def _names(keys: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"{direction} {stream}" for stream, direction in sorted(keys)) or "none"


def _shortened(record: Mapping[str, Any]) -> RegionError:
    """A rank's error, cut to what a board entry may hold."""
    limits = {"region": 64, "kind": 32, "detail": _MAX_CHARS, "key": 200}
    short = {
        name: value[: limits.get(name, 0)] if isinstance(value, str) else value
        for name, value in record.items()
    }
    return RegionError.from_record(short)
