"""When messages came and went at a rank: what the two ends of a stream know of their way.

No clocks are compared. A message's acknowledgement comes from the peer's *rank*, so the time from
its sending to that, less the time that it lay at the peer, is a round trip of the link.
"""

from typing import NamedTuple

MAX_TIMES = 512
"""Of either kind, kept until somebody asks; older ones are forgotten."""


class Passage(NamedTuple):
    """A whole message that was sent and that the peer's rank has released; monotonic seconds."""

    kind: str
    step: int
    microbatch: int
    sent_s: float
    """When its sender was done with it; what packing took beside the sender comes after that."""
    acked_s: float


class Hold(NamedTuple):
    """How long a whole message lay here: from its last part's arrival to its release, or until it
    began to be unpacked beside the stage."""

    kind: str
    step: int
    microbatch: int
    held_s: float
