"""What a lane needs of the connection below it, so that links run over real and fake ones alike."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


class DialError(Exception):
    """No connection to the peer came about; the text says why, for people."""

    def __init__(self, reason: str, *, is_lasting: bool = False) -> None:
        """
        Args:
            is_lasting: Somebody has to mend something; trying again alone will not do.
        """
        super().__init__(reason)
        self.is_lasting = is_lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class BbrState:
    """What can be seen of a connection's BBR."""

    min_rtt_us: int
    """The shortest round trip that it goes by."""
    rate_bytes_s: int
    """What it takes the path to carry, as far as this connection has tried."""
    is_probed: bool
    """Whether it lets nearly nothing through, to see the path without a queue (PROBE_RTT)."""
    is_idle: bool
    """Whether nothing is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCounts:
    """What the kernel knows of a connection."""

    acked_bytes: int
    """Sent, and acknowledged by the peer's kernel."""
    retransmitted_bytes: int
    limited_s: float
    """For how long a window, the peer's or our own, kept it from sending."""
    rtt_s: float
    """Smoothed, of what is sent now; no process has a part in it."""
    bbr: BbrState | None = None
    """None under any other congestion control."""


class Receiver(Protocol):
    """The upper end: gets the bytes of one carrier."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go; never empty."""

    def buffer_updated(self, nbytes: int) -> None:
        """The first `nbytes` of that buffer are filled."""

    def pause_writing(self) -> None:
        """Something is left in the write buffer."""

    def resume_writing(self) -> None:
        """The write buffer is empty again."""

    def connection_lost(self, reason: str) -> None:
        """The connection is gone; called exactly once."""


class Carrier(Protocol):
    """One connection to a peer, whole and in order until it breaks."""

    @property
    def peer_address(self) -> str: ...

    @property
    def congestion(self) -> str:
        """The kernel's control of this connection's bulk, or "" where there is none."""

    @property
    def congestion_refused(self) -> str:
        """What was asked for by name and not given, in one sentence; "" where all is as asked."""

    @property
    def tls(self) -> str:
        """Version and cipher, or "no"."""

    def start(self, receiver: Receiver) -> None:
        """From now on `receiver` gets what arrives; called once, before anything else."""

    def write(self, data: bytes | memoryview) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def expect_rate(self, rate_bytes_per_s: float | None) -> None:
        """What the path has carried of late, to size what waits below; None: not known."""

    def pace(self, rate_bytes_per_s: float) -> None:
        """Send no faster than this, where the kernel can see to it; `math.inf`: as it likes."""

    def carry(self, *, bulk: bool) -> None:
        """From now on bulk too, as a connection does at first; or control records alone."""

    def counts(self) -> KernelCounts | None:
        """None where the kernel does not tell."""

    def close(self) -> None:
        """Close once everything written is out."""

    def end_writing(self) -> None:
        """Write no more; reading goes on until the peer has read all and closes."""

    def abort(self) -> None:
        """Close now; what is not out is dropped."""


Dial = Callable[[], AbstractAsyncContextManager[Carrier]]
"""Connects to the peer for the length of the context. Raises DialError; has its own deadline."""
