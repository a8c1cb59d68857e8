"""How many files and connections the daemon may have open, and what it says without any left."""

import asyncio
import errno
import logging
import resource
from typing import Any

logger = logging.getLogger(__name__)

ENOUGH = 65_536
_SAY_AGAIN_S = 60.0


def raise_limit() -> None:
    """For 65 lanes a peer and whoever else connects, as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Shortage:
    """The loop's exception handler: asyncio tells of each connection that could not be accepted."""

    def __init__(self) -> None:
        self._told_at = -_SAY_AGAIN_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
            return
        if loop.time() - self._told_at >= _SAY_AGAIN_S:
            self._told_at = loop.time()
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error(
                "! nobody can connect: all %d descriptors are in use; raise the limit (ulimit -n, "
                "LimitNOFILE= of a systemd unit)",
                limit,
            )
