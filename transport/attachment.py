"""The rank's end of the attachment: one socket to the daemon, one arena, one I/O thread.

The training thread sends without ever waiting for the socket, and waits for events in `wait` only.
The I/O thread reads the daemon's records, sends what did not fit at once, and beats once a second,
so that a rank busy in a long action is known to be alive.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from geotrain.errors import AttachError
from geotrain.transport import attachment_exit
from geotrain.transport.arena import OUT, PAGE_BYTES, Arena, plan_rings
from geotrain.transport.attachment_dial import (
    RETRY_S,
    Answer,
    RefusedError,
    WentAwayError,
    attach,
    dial,
)
from geotrain.transport.attachment_incoming import InStream
from geotrain.transport.attachment_io import AttachmentIO, Returned
from geotrain.transport.attachment_streams import OutStream
from geotrain.transport.maps import get_list, get_map, get_str
from geotrain.transport.messages import Message, Presence, view_id
from geotrain.transport.records import (
    ATTACHMENT_PROTO,
    AttachRequest,
    get_count,
    get_counts,
)
from geotrain.transport.restoring import Restored, to_records

CLOSE_TIMEOUT_S = 2.0
"""How long `close` waits for the daemon to take the last records."""
ANSWER_TIMEOUT_S = 10.0
"""For a daemon that has just been started to answer a rank that resumes."""
_MAX_STACKS_CHARS = 40_000


class Attachment:
    """One rank's place at its region's daemon. Every method may be called from any thread."""

    def __init__(
        self,
        sock: socket.socket,
        arena: Arena,
        request: AttachRequest,
        answer: Answer,
        *,
        arena_fd: int,
        socket_path: Path,
        return_s: float,
    ) -> None:
        self.incarnation = answer.incarnation
        self.region_index = answer.region_index
        self.region = request.region
        self.stop_reason: str | None = None
        self.links: Mapping[str, Mapping[str, Any]] = {}
        self._arena = arena
        self._arena_fd = arena_fd
        """For the next daemon."""
        self._request = request
        self._socket_path = socket_path
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._board: dict[str, Presence] = {}
        self._action = ("attached", time.monotonic())
        self._step = -1
        self._ended = False
        self._said: dict[str, Any] = {"state": "attached"}
        """What this rank last said of itself, as fields of its board entry."""
        self._io = AttachmentIO(
            sock,
            reader=answer.reader,
            lock=self._lock,
            daemon=f"the daemon of region {request.region}",
            on_records=self._handle,
            on_gone=self.nudge,
            beat=self._beat,
            return_s=return_s,
            find=self._find_daemon,
            resume=lambda: to_records(self._kept()),
        )
        self._out: dict[int, OutStream] = {}
        self._in: dict[int, InStream] = {}
        for (stream, direction), (offset, capacity) in request.rings.items():
            memory = arena.view(offset, capacity)
            if direction == OUT:
                self._out[stream] = OutStream(
                    stream=stream, memory=memory, lock=self._lock, post=self._io.post
                )
            else:
                self._in[stream] = InStream(
                    stream=stream, memory=memory, lock=self._lock, post=self._io.post
                )
        self._handle(answer.records)
        self._io.start()
        attachment_exit.watch(self)

    @classmethod
    def connect(
        cls,
        socket_path: str | Path,
        *,
        run_hash: str,
        version: str,
        region: str,
        rank: int,
        world_size: int,
        arena_bytes: int,
        streams_in: Sequence[int],
        streams_out: Sequence[int],
        timeout_s: float,
        return_s: float = 0.0,
    ) -> "Attachment":
        """Attach to the daemon at `socket_path`, waiting for it to come up if need be.

        Args:
            return_s: How long a daemon that is killed may take to be started again: until then
                nothing is lost, and everything waits.

        Raises:
            AttachError: Refused, no memory for the arena, or no answer within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        rings = plan_rings(arena_bytes, streams_in, streams_out)
        request = AttachRequest(
            proto=ATTACHMENT_PROTO,
            version=version,
            run_hash=run_hash,
            region=region,
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            arena_bytes=max(PAGE_BYTES, sum(capacity for _, capacity in rings.values())),
            rings=rings,
        )
        while True:
            sock = dial(Path(socket_path), region=region, deadline=deadline)
            try:
                arena, arena_fd, answer = _hand_over(sock, request, deadline)
                break
            except WentAwayError:
                if time.monotonic() + RETRY_S >= deadline:
                    raise
            time.sleep(RETRY_S)
        attachment = cls(
            sock,
            arena,
            request,
            answer,
            arena_fd=arena_fd,
            socket_path=Path(socket_path),
            return_s=return_s,
        )
        attachment._await_board(answer.num_regions, deadline)
        return attachment

    # What the rank says.

    @property
    def action(self) -> str:
        """What the rank is doing; beats carry it with its age."""
        return self._action[0]

    @action.setter
    def action(self, text: str) -> None:
        self._action = (text, time.monotonic())

    def ready(self, identity: Mapping[str, Any]) -> None:
        """Announce that this region can run; `identity` is what the regions compare."""
        self._post_beat()
        with self._lock:
            self._said = {"state": "ready", "identity": dict(identity)}
            self._io.post({"type": "ready", "identity": dict(identity)})

    def report(self, numbers: Mapping[str, Any]) -> None:
        """Publish a finished step for the status page; `step` and `num_tokens` are understood."""
        self._step = int(numbers.get("step", self._step))
        self._post_beat()
        self._io.post({"type": "report", "report": dict(numbers)})

    def fail(self, error: Mapping[str, Any]) -> None:
        """Tell every region what ended this one: the record of a RegionError."""
        self._end({"type": "fail", "error": dict(error)})

    def leave(self, reason: str) -> None:
        """Tell every region that this rank goes in order. Later calls, and calls after `fail`, do
        nothing. The peers' ranks release at their own pace: wait for `unacknowledged` first."""
        self._end({"type": "leave", "reason": reason})

    def close(self) -> None:
        """Leave if that has not been said, wait shortly for the daemon to read it, and let go."""
        attachment_exit.unwatch(self)
        self.leave("closed")
        self._io.close(CLOSE_TIMEOUT_S)
        for out in self._out.values():
            out.close()
        for incoming in self._in.values():
            incoming.close()
        self._close_arena_fd()
        self._arena.close()

    def abandon_in_child(self) -> None:
        """In a forked child: the socket is the parent's, and must end with the parent alone."""
        self._ended = True
        self._close_arena_fd()
        self._io.abandon()

    def _close_arena_fd(self) -> None:
        fd, self._arena_fd = self._arena_fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def outage(self) -> str:
        """Why the daemon cannot be reached at the moment; empty while it can."""
        return self._io.outage

    # What the rank learns.

    def board(self) -> Mapping[str, Presence]:
        """The newest entry of every region, in region order; a copy."""
        with self._lock:
            return dict(self._board)

    def open_view(self, view: int, peer_rings: Mapping[int, int]) -> None:
        """Start sequence numbers at 0 in a new view.

        Args:
            view: `view_id` of the incarnations on the board.
            peer_rings: Outgoing stream -> capacity of the in-ring at the peer, in bytes.
        """
        with self._lock:
            for stream, out in self._out.items():
                out.open(view, peer_rings[stream])
            for incoming in self._in.values():
                incoming.open(view)

    def out(self, stream: int) -> OutStream:
        return self._out[stream]

    def incoming(self, stream: int) -> InStream:
        return self._in[stream]

    def wait(self, ready: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `ready()`, looked at again after each record; False at the deadline.

        Raises:
            AttachError: The daemon is gone for good.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if ready():
                    return True
                if self._io.gone is not None:
                    raise AttachError(self._io.gone)
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._changed.wait(remaining_s)

    def nudge(self) -> None:
        """Have whoever waits look again: something changed that no record tells of."""
        with self._changed:
            self._changed.notify_all()

    def _await_board(self, num_regions: int, deadline: float) -> None:
        """Nobody shall take a board that is still coming in for the whole line."""
        timeout_s = max(0.0, deadline - time.monotonic())
        if not self.wait(lambda: len(self._board) == num_regions, timeout_s=timeout_s):
            self.close()
            raise AttachError(f"the daemon of region {self.region} did not answer in time")

    def _post_beat(self) -> None:
        beat = self._beat()
        if beat is not None:
            self._io.post(beat)

    def _end(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            if self._ended or self._io.gone is not None:
                return
            self._ended = True
            self._io.post(record)

    # Called by the I/O thread.

    def _beat(self) -> Mapping[str, Any] | None:
        action, since = self._action
        if self._ended:
            return None
        age_s = time.monotonic() - since
        return {"type": "beat", "action": action, "age_s": age_s, "step": self._step}

    def _handle(self, records: list[dict[str, Any]]) -> None:
        with self._changed:
            for record in records:
                self._handle_one(record)
            self._changed.notify_all()

    def _handle_one(self, record: dict[str, Any]) -> None:
        match record["type"]:
            case "deliver":
                self._on_deliver(record)
            case "acked":
                stream = self._out.get(get_count(record, "stream"))
                if stream is None:
                    raise ValueError("an acknowledgement for a stream that is not ours")
                stream.on_acked(
                    get_count(record, "view"),
                    get_counts(record, "seqs"),
                    get_counts(record, "wire_bytes"),
                )
            case "board":
                for entry in get_list(record, "entries"):
                    presence = Presence.from_map(entry)
                    known = self._board.get(presence.region)
                    # A daemon that was just started knows less than this rank does.
                    if known is None or presence.rank >= known.rank:
                        self._board[presence.region] = presence
            case "links":
                self.links = get_map(record, "links") or {}
            case "stop":
                self.stop_reason = get_str(record, "reason") or None
            case "refused":
                raise AttachError(get_str(record, "reason"))
            case "stacks":
                text = _stacks()
                self._io.post({"type": "stacks", "id": record.get("id"), "text": text})

    # When a daemon ended without a word; called by the I/O thread.

    def _find_daemon(self, timeout_s: float) -> Returned | None:
        own = self._board[self.region]
        if self._ended or own.state in ("failed", "left") or own.incarnation != self.incarnation:
            raise AttachError(
                f"the daemon of region {self.region} is gone; start it again, then this process"
            )
        deadline = time.monotonic() + timeout_s
        request = replace(self._request, resumes=self.incarnation)
        sock = None
        try:
            sock = dial(self._socket_path, region=self.region, deadline=deadline)
            answer = attach(
                sock, request, self._arena_fd, deadline=time.monotonic() + ANSWER_TIMEOUT_S
            )
        except AttachError as exc:
            if sock is not None:
                sock.close()
            if isinstance(exc, RefusedError):
                raise
            return None
        return Returned(socket=sock, reader=answer.reader, records=answer.records)

    def _kept(self) -> Restored:
        """What the next daemon must know; under the lock."""
        board = dict(self._board)
        own = replace(board.pop(self.region), **self._said)
        view = view_id([presence.incarnation for presence in self._board.values()])
        capacities = {n: size for entry in board.values() for n, size in entry.rings.items()}
        opened = {out.view for out in self._out.values()}
        opened |= {incoming.delivered_view for incoming in self._in.values()}
        return Restored(
            view=view if view in opened else 0,
            own=own,
            board=list(board.values()),
            sends={n: out.kept(view, capacities.get(n, 0)) for n, out in self._out.items()},
            receives={n: incoming.kept(view) for n, incoming in self._in.items()},
        )

    def _on_deliver(self, record: dict[str, Any]) -> None:
        message = Message.from_map(get_map(record, "message") or {}, with_start=True)
        incoming = self._in.get(message.stream)
        if incoming is None or message.start + message.payload_bytes > incoming.capacity:
            raise ValueError("a message for a ring that is not ours")
        incarnations = [presence.incarnation for presence in self._board.values()]
        incoming.on_delivered(message, board_view=view_id(incarnations) if incarnations else 0)


def _hand_over(
    sock: socket.socket, request: AttachRequest, deadline: float
) -> tuple[Arena, int, Answer]:
    """Make the arena and attach with it; leaves nothing open when that fails.

    Returns:
        The arena, its descriptor, which the caller closes, and the answer.
    """
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sock.close)
        arena, fd = Arena.create(request.arena_bytes)
        on_failure.callback(arena.close)
        on_failure.callback(os.close, fd)
        answer = attach(sock, request, fd, deadline=deadline)
        on_failure.pop_all()
    return arena, fd, answer


def _stacks() -> str:
    """Every thread's Python stack."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "\n".join(parts)[:_MAX_STACKS_CHARS]
