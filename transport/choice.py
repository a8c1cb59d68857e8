"""Where two lanes of one link meet: which one stays (P-13). Pure."""

from dataclasses import dataclass

TWO_LANES = "two lanes met, one stays"
OUTDATED = "from a daemon that was replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFacts:
    """What the choice needs to know of a lane."""

    boot: int
    """When the peer's daemon started."""
    dialled: bool
    """Whether this side dialled."""


def why_not(
    new: LaneFacts, *, current: LaneFacts | None, mine_is_lower: bool, is_greeting: bool
) -> str | None:
    """Why a lane that has shaken hands must close; None where it becomes the link's lane.

    Args:
        current: The link's open lane.
        mine_is_lower: Whether this region's index is below the peer's.
        is_greeting: Whether another lane, dialled here, waits for the peer's WELCOME.
    """
    if current is None:
        # Our own dial is about to succeed, and it is the one to stay.
        met = is_greeting and mine_is_lower and not new.dialled
        return TWO_LANES if met else None
    if new.boot != current.boot:
        return None if new.boot > current.boot else OUTDATED
    if new.dialled == current.dialled:
        # Whoever dials again has given the old lane up.
        return None
    return None if new.dialled == mine_is_lower else TWO_LANES
