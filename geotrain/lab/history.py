"""What was changed on a lab's links, and why, for whoever shows it."""

from collections import deque
from collections.abc import Mapping
from typing import Any

_LENGTH = 100


class History:
    """The last changes, oldest first."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=_LENGTH)

    def add(self, links: str, settings: Mapping[str, Any], *, why: str, now: float) -> None:
        """`now` on the machine's monotonic clock, which all its processes share."""
        event = {"at": now, "links": links, "settings": dict(settings), "why": why}
        self._events.append(event)

    def events(self) -> list[dict[str, Any]]:
        return list(self._events)
