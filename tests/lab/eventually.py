"""For what a busy machine can only make worse: one good look in time is enough."""

import time
from collections.abc import Callable

LIMIT_S = 30.0


def eventually(look: Callable[[], bool], *, limit_s: float = LIMIT_S) -> bool:
    """Whether `look` is true once before the deadline; at least one look is taken."""
    deadline = time.monotonic() + limit_s
    while not look():
        if time.monotonic() >= deadline:
            return False
    return True
