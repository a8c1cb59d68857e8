"""What state a link is in, since when and why, as the log and the status page tell it.

state       what is so                                          reason tells
connecting  no lane yet; this side dials                        -
down        no lane; this side dials again, or waits for a dial why the last try or lane ended
refused     one side refused the other; tried again slowly      which keys differ, both values
connected   a control lane is open                              -
"""

import logging
import time
from collections.abc import Callable

from geotrain.transport.messages import printable

logger = logging.getLogger(__name__)


class LinkState:
    """See the module."""

    def __init__(self, peer: str, *, dials: bool, on_change: Callable[[], None]) -> None:
        self.state = "connecting" if dials else "down"
        self.reason = "" if dials else f"waiting for region {peer} to dial in"
        self._peer = peer
        self._on_change = on_change
        self._since = time.monotonic()
        self._ever_connected = False

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._since

    def set(
        self,
        state: str,
        reason: str,
        *,
        detail: str = "",
        as_asked: bool = False,
        is_lasting: bool = False,
    ) -> None:
        """Note a change, and log it in one line; the same again says nothing.

        Args:
            detail: For the log alone: an address, the last frame.
            as_asked: Whether one of the two sides is done, which is nothing to warn of.
            is_lasting: Whether somebody has to mend something before there can be a link.
        """
        reason = printable(reason)
        if (state, reason) == (self.state, self.reason):
            return
        if state != self.state:
            self._since = time.monotonic()
        self.state, self.reason = state, reason
        if state == "connected":
            self._ever_connected = True
            logger.info("= link to %s: connected (%s)", self._peer, detail)
        elif state == "refused":
            logger.error("! link to %s: refused: %s", self._peer, reason)
        elif is_lasting:
            logger.warning("! link to %s: %s", self._peer, reason)
        elif not self._ever_connected:
            logger.info("= link to %s: not there yet, trying again: %s", self._peer, reason)
        else:
            more = f"; {detail}" if detail else ""
            level = logging.INFO if as_asked else logging.WARNING
            logger.log(level, "x link to %s: %s%s", self._peer, reason, more)
        self._on_change()
