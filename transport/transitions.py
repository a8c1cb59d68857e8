"""What may arrive on a lane in which state, and what it leads to. Data only.

the control lane
    dialled here:   WAIT_WELCOME --WELCOME--> NAMED --admit()--> OPEN --CLOSE--> CLOSED
    dialled there:  WAIT_HELLO ----HELLO----> NAMED --admit()--> OPEN --CLOSE--> CLOSED
a bulk lane
    dialled here:   WAIT_JOINED ---JOINED---> JOINING --admit()--> BULK --CLOSE--> CLOSED
    dialled there:  WAIT_HELLO ----JOIN-----> JOINING --admit()--> BULK --CLOSE--> CLOSED
a disagreement in HELLO or WELCOME, or REFUSE where TRANSITIONS lists it: CLOSED
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from geotrain.transport.frame import FrameType
from geotrain.transport.lives import MAX_BULK_LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    ping_interval_s: float = 1.0
    silent_s: float = 10.0
    """A lane whose oldest unanswered ping is older is dead (P-11)."""
    num_lanes: int | None = None
    """Bulk lanes; None: as many as it pays to have. The side that dials decides."""
    congestion: str = "auto"
    """What a lane that is dialled asks the kernel for; see congestion.py."""

    def __post_init__(self) -> None:
        if self.ping_interval_s <= 0 or self.silent_s <= 0:
            raise ValueError("ping_interval_s and silent_s must be > 0")
        if self.num_lanes is not None and not 1 <= self.num_lanes <= MAX_BULK_LANES:
            raise ValueError(f"num_lanes must be 1 to {MAX_BULK_LANES}, got {self.num_lanes}")


class State(Enum):
    WAIT_WELCOME = "waiting for WELCOME"
    WAIT_HELLO = "waiting for HELLO"
    WAIT_JOINED = "waiting for JOINED"
    NAMED = "named"
    JOINING = "joining"
    OPEN = "open"
    BULK = "open for bulk"
    CLOSED = "closed"


T = FrameType
TRANSITIONS: Mapping[State, Mapping[FrameType, tuple[str, State]]] = {
    State.WAIT_WELCOME: {
        T.WELCOME: ("_on_hello", State.NAMED),
        T.REFUSE: ("_on_refuse", State.CLOSED),
        T.CLOSE: ("_on_close", State.CLOSED),
    },
    State.WAIT_HELLO: {
        T.HELLO: ("_on_hello", State.NAMED),
        T.JOIN: ("_on_join", State.JOINING),
        T.CLOSE: ("_on_close", State.CLOSED),
    },
    State.WAIT_JOINED: {
        T.JOINED: ("_on_joined", State.JOINING),
        T.CLOSE: ("_on_close", State.CLOSED),
    },
    State.NAMED: {},
    State.JOINING: {},
    State.OPEN: {
        T.BOARD: ("_on_board", State.OPEN),
        T.RESUME: ("_on_session", State.OPEN),
        T.MESSAGE: ("_on_session", State.OPEN),
        T.CHUNK: ("_on_chunk", State.OPEN),
        T.ACK: ("_on_session", State.OPEN),
        T.NAK: ("_on_session", State.OPEN),
        T.GONE: ("_on_session", State.OPEN),
        T.LANES: ("_on_lanes", State.OPEN),
        T.PING: ("_on_ping", State.OPEN),
        T.PONG: ("_on_pong", State.OPEN),
        T.REFUSE: ("_on_refuse", State.CLOSED),
        T.CLOSE: ("_on_close", State.CLOSED),
    },
    State.BULK: {
        T.CHUNK: ("_on_chunk", State.BULK),
        T.PING: ("_on_ping", State.BULK),
        T.PONG: ("_on_pong", State.BULK),
        T.CLOSE: ("_on_close", State.CLOSED),
    },
    State.CLOSED: {},
}
"""state -> frame -> (handler, next state)."""
