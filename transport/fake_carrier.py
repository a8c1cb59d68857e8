"""A carrier in memory: two ends, bytes moved when and in what pieces a test says, or at once."""

import asyncio

from geotrain.transport.carrier import KernelCounts, Receiver


class FakeCarrier:
    """One end of a pair; see `carrier_pair`."""

    peer_address = "memory"
    congestion = ""
    congestion_refused = ""
    tls = "no"

    def __init__(self, *, automatic: bool) -> None:
        self._automatic = automatic
        self._other: FakeCarrier = self
        self._receiver: Receiver | None = None
        self._outbox = bytearray()
        self._paused = False
        self._closing = False
        self._lost = False
        self._scheduled = False

    def join(self, other: "FakeCarrier") -> None:
        self._other, other._other = other, self

    @property
    def bytes_waiting(self) -> int:
        """Written here and not yet delivered to the other end."""
        return len(self._outbox)

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._other._schedule()

    def write(self, data: bytes | memoryview) -> None:
        if not (self._closing or self._lost):
            self._outbox += data
            self._schedule()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._other._schedule()

    def expect_rate(self, rate_bytes_per_s: float | None) -> None:
        """Nothing waits below."""

    def pace(self, rate_bytes_per_s: float) -> None:
        """Memory has no rate."""

    def carry(self, *, bulk: bool) -> None:
        """Memory delays neither."""

    def counts(self) -> KernelCounts | None:
        return None

    def close(self) -> None:
        self._closing = True
        self._schedule()

    def end_writing(self) -> None:
        self.close()

    def abort(self) -> None:
        self.cut("aborted")

    def cut(self, reason: str) -> None:
        """Break the connection: what was not delivered never will be."""
        for end in (self, self._other):
            end._outbox.clear()
            if not end._lost:
                end._lost = True
                if end._receiver is not None:
                    end._receiver.connection_lost(reason)

    def deliver(self, limit: int = 1 << 20) -> int:
        """Hand up to `limit` of the waiting bytes to the other end; returns how many."""
        receiver = self._other._receiver
        delivered = 0
        while self._outbox and delivered < limit and not self._other._paused and receiver:
            room = receiver.get_buffer(-1)
            taken = min(len(room), len(self._outbox), limit - delivered)
            room[:taken] = self._outbox[:taken]
            del self._outbox[:taken]
            delivered += taken
            receiver.buffer_updated(taken)
        if self._closing and not self._outbox and not self._lost:
            self.cut("closed")
        return delivered

    def _schedule(self) -> None:
        if self._automatic and not self._scheduled and (self._outbox or self._closing):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver_soon)

    def _deliver_soon(self) -> None:
        self._scheduled = False
        self.deliver()
        if self._outbox and self._other._receiver is not None and not self._other._paused:
            self._schedule()


def carrier_pair(*, automatic: bool = False) -> tuple[FakeCarrier, FakeCarrier]:
    """Two joined ends.

    Args:
        automatic: Deliver in the running loop's next turns; else only when `deliver` is called.
    """
    one, other = FakeCarrier(automatic=automatic), FakeCarrier(automatic=automatic)
    one.join(other)
    return one, other
