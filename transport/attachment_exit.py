"""What a rank's process says to its daemon when it ends, whichever way it ends.

A normal exit leaves in order; an uncaught exception is reported with its text; a forked child (a
DataLoader worker) lets go of the socket, or it would hide the rank's death from the daemon.
"""

import atexit
import os
import sys
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from geotrain.errors import RegionError


class Attached(Protocol):
    """What the ends of a process need of an attachment."""

    region: str

    def fail(self, error: Mapping[str, Any]) -> None: ...
    def leave(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def abandon_in_child(self) -> None: ...


_live: "weakref.WeakSet[Attached]" = weakref.WeakSet()
_installed = False


def watch(attachment: Attached) -> None:
    global _installed
    _live.add(attachment)
    if not _installed:
        _installed = True
        os.register_at_fork(after_in_child=_abandon_all)
        atexit.register(_leave_all)
        _chain_excepthook()


def unwatch(attachment: Attached) -> None:
    _live.discard(attachment)


def _abandon_all() -> None:
    for attachment in list(_live):
        attachment.abandon_in_child()
    _live.clear()


def _leave_all() -> None:
    for attachment in list(_live):
        attachment.leave("the process ended")
        attachment.close()


def _chain_excepthook() -> None:
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        for attachment in list(_live):
            _tell(attachment, error)
        previous(kind, error, traceback)

    sys.excepthook = excepthook


def _tell(attachment: Attached, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        attachment.leave("interrupted")
    elif isinstance(error, RegionError) and error.region != attachment.region:
        attachment.leave(f"stopped by an error in region {error.region}")
    elif isinstance(error, RegionError):
        attachment.fail(error.to_record())
    else:
        text = f"in user code: {type(error).__name__}: {error}"[:4000]
        own = RegionError(region=attachment.region, kind="exception", detail=text)
        attachment.fail(own.to_record())
