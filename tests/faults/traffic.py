"""Load while a fault happens: each rank sends messages that follow from a seed, and checks what it
takes against the same seed: every byte, in order, each once."""

import threading
import time
from collections.abc import Callable
from random import Random

from geotrain.transport.attachment import Attachment
from geotrain.transport.attachment_incoming import Received
from tests.faults.line import NUM_LANES, Line
from tests.transport.local_line import open_views

POLL_S = 0.02
_SIZES = (0, 1, 100, 4_096, 60_000, 400_000)
"""0 has no payload at all; the largest is several chunks, and fits the ring more than once."""


def payload_of(seed: int, stream: int, number: int) -> bytes:
    """The message with this number; up to 4 KiB it rides in its record."""
    rng = Random(f"{seed} {stream} {number}")
    size = rng.choice(_SIZES)
    return rng.randbytes(rng.randint(size // 2, size))


class Rank:
    """One end, on a thread of its own until both directions have ended."""

    def __init__(self, attachment: Attachment, *, seed: int, limit_s: float) -> None:
        index = attachment.region_index
        self.num_taken = 0
        self.is_paused = False
        """Takes nothing while set: its arena fills up."""
        self.is_resting = False
        """Whether it has seen that it is paused."""
        self.is_stopping = False
        self.error: BaseException | None = None
        self._attachment = attachment
        self._sends, self._receives = (0, 1) if index == 0 else (1, 0)
        self._seed = seed
        self._deadline = time.monotonic() + limit_s
        self._num_sent = 0
        self._said_end = self._heard_end = False
        self.thread = threading.Thread(target=self._run, name=f"rank {index}")
        self.thread.start()

    @property
    def link_state(self) -> str:
        return next((str(link["state"]) for link in self._attachment.links.values()), "unknown")

    @property
    def link_is_down(self) -> bool:
        """As far as the daemon has said so."""
        return self.link_state not in ("unknown", "connected")

    @property
    def link_lanes(self) -> int:
        """How many lanes of either kind the link has had; 0 before anything is known."""
        links = self._attachment.links.values()
        return next((link["lanes_opened"] + link["bulk_lanes_opened"] for link in links), 0)

    @property
    def has_all_lanes(self) -> bool:
        links = self._attachment.links.values()
        return all(link["num_lanes"] == NUM_LANES for link in links)

    @property
    def is_full(self) -> bool:
        """Whether the peer grants no credit for a large message."""
        return not self._attachment.out(self._sends).fits(_SIZES[-1])

    def _run(self) -> None:
        try:
            while not (self._said_end and self._heard_end):
                assert time.monotonic() < self._deadline, f"not done in time: {self.describe()}"
                self._attachment.wait(self._can_act, timeout_s=POLL_S)
                self._send_one()
                self._take_all()
                self.is_resting = self.is_paused
            left_s = max(0.0, self._deadline - time.monotonic())
            out = self._attachment.out(self._sends)
            done = self._attachment.wait(lambda: out.unacknowledged == 0, timeout_s=left_s)
            assert done, f"not acknowledged: {self.describe()}"
        except BaseException as error:  # of any kind: the test's thread raises it again
            self.error = error

    def _can_act(self) -> bool:
        can_take = not self.is_paused and self._attachment.incoming(self._receives).pending() > 0
        return can_take or (not self._said_end and not self.is_full)

    def _send_one(self) -> None:
        out = self._attachment.out(self._sends)
        if self._said_end or not out.fits(0) or self.is_full:
            return
        if self.is_stopping:
            out.send(kind="end", step=0, microbatch=-1, header=b"%d" % self._num_sent)
            self._said_end = True
            return
        payload = payload_of(self._seed, self._sends, self._num_sent)
        place = {"kind": "forward", "step": 0, "microbatch": self._num_sent}
        if len(payload) <= 1_024:
            out.send(**place, inline=payload)
        else:
            start, slot = out.reserve(len(payload))
            slot[:] = payload
            out.send(**place, start=start, payload_bytes=len(payload))
        self._num_sent += 1

    def _take_all(self) -> None:
        incoming = self._attachment.incoming(self._receives)
        while not self.is_paused and (received := incoming.take()) is not None:
            self._check(received)
            received.release()

    def _check(self, received: Received) -> None:
        assert not self._heard_end, "a message after the last one"
        message = received.message
        if message.kind == "end":
            assert message.header == b"%d" % self.num_taken, (message.header, self.num_taken)
            self._heard_end = True
            return
        assert message.microbatch == self.num_taken, f"{message.microbatch}, not {self.num_taken}"
        expected = payload_of(self._seed, self._receives, self.num_taken)
        assert received.payload == expected, f"message {self.num_taken} differs"
        self.num_taken += 1

    def describe(self) -> str:
        return (
            f"sent {self._num_sent}, taken {self.num_taken}, ended {self._said_end} and "
            f"{self._heard_end}, link {self.link_state} ({dict(self._attachment.links)})"
        )


class Traffic:
    """Both ranks; a context manager that ends well only if everything arrived."""

    def __init__(self, line: Line, *, seed: int, limit_s: float) -> None:
        self._line = line
        self._seed, self._limit_s = seed, limit_s
        self.ranks: list[Rank] = []

    def __enter__(self) -> "Traffic":
        self._attachments = [self._line.attach(name) for name in ("a", "b")]
        open_views(*self._attachments)
        self.ranks = [
            Rank(attachment, seed=self._seed, limit_s=self._limit_s)
            for attachment in self._attachments
        ]
        self._deadline = time.monotonic() + self._limit_s
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        try:
            for rank in self.ranks:
                rank.is_paused, rank.is_stopping = False, True
                if kind is not None:
                    rank._deadline = 0.0
            for rank in self.ranks:
                rank.thread.join(self._limit_s)
            if kind is None:
                self._raise_errors()
        finally:
            for attachment in self._attachments:
                attachment.close()

    def until(self, ready: Callable[[], bool], what: str) -> None:
        while not ready():
            self._raise_errors()
            assert time.monotonic() < self._deadline, f"not in time: {what}\n{self.describe()}"
            time.sleep(POLL_S)

    def progress(self, count: int) -> None:
        """Wait until so many messages more have crossed each way."""
        goals = [rank.num_taken + count for rank in self.ranks]
        self.until(
            lambda: all(r.num_taken >= g for r, g in zip(self.ranks, goals, strict=True)),
            f"{count} messages more each way",
        )

    def lanes(self) -> int:
        """How many lanes the link has had, at least; waits for word of them."""
        self.until(lambda: all(rank.link_lanes > 0 for rank in self.ranks), "word of the lanes")
        return min(rank.link_lanes for rank in self.ranks)

    def describe(self) -> str:
        return "\n".join([*(rank.describe() for rank in self.ranks), self._line.logs()])

    def _raise_errors(self) -> None:
        for rank in self.ranks:
            if rank.error is not None:
                raise AssertionError(f"{rank.error!r}\n{self.describe()}") from rank.error
