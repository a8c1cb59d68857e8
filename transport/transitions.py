"""What may arrive on a lane in which state, and what it leads to. Data only.

dialled here:   WAIT_WELCOME --WELCOME--> NAMED --admit()--> OPEN --CLOSE--> CLOSED
dialled there:  WAIT_HELLO ----HELLO----> NAMED --admit()--> OPEN --CLOSE--> CLOSED
a disagreement in HELLO or WELCOME, or REFUSE, in any state: CLOSED
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from geotrain.transport.frame import FrameType


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    ping_interval_s: float = 1.0
    silent_s: float = 10.0
    """A lane whose oldest unanswered ping is older is dead (P-11)."""
    congestion: str = "auto"
    """What a lane that is dialled asks the kernel for; see congestion.py."""

    def __post_init__(self) -> None:
        if self.ping_interval_s <= 0 or self.silent_s <= 0:
            raise ValueError("ping_interval_s and silent_s must be > 0")


class State(Enum):
    WAIT_WELCOME = "waiting for WELCOME"
    WAIT_HELLO = "waiting for HELLO"
    NAMED = "named"
    OPEN = "open"
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
        T.CLOSE: ("_on_close", State.CLOSED),
    },
    State.NAMED: {},
    State.OPEN: {
        T.BOARD: ("_on_board", State.OPEN),
        T.RESUME: ("_on_session", State.OPEN),
        T.MESSAGE: ("_on_session", State.OPEN),
        T.CHUNK: ("_on_chunk", State.OPEN),
        T.ACK: ("_on_session", State.OPEN),
        T.NAK: ("_on_session", State.OPEN),
        T.PING: ("_on_ping", State.OPEN),
        T.PONG: ("_on_pong", State.OPEN),
        T.REFUSE: ("_on_refuse", State.CLOSED),
        T.CLOSE: ("_on_close", State.CLOSED),
    },
    State.CLOSED: {},
}
"""state -> frame -> (handler, next state)."""
