"""What a day has cost, kept beside the daemon's socket: a restart must not renew the budget."""

import json
import logging
import math
from pathlib import Path

from geotrain.daemon.egress import Spent
from geotrain.whole_file import write_whole

logger = logging.getLogger(__name__)


class EgressFile:
    """The file; it stays when the daemon ends."""

    def __init__(self, socket_path: Path) -> None:
        self.path = socket_path.with_name(socket_path.name + ".egress.json")
        self._written: Spent | None = None

    def read(self) -> Spent | None:
        """None where there is none yet, or none that can be understood, which is told."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            spent = Spent(day=str(found["day"]), bytes=int(found["bytes"]), usd=float(found["usd"]))
            if not (spent.bytes >= 0 and 0 <= spent.usd < math.inf):
                raise ValueError("no such sums can have been spent")
            return spent
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("! egress counts from 0 today: cannot read %s: %s", self.path, error)
            return None

    def write(self, spent: Spent) -> None:
        """Replace the file as a whole; one that cannot be written is told once."""
        if spent == self._written:
            return
        record = {"day": spent.day, "bytes": spent.bytes, "usd": spent.usd}
        try:
            write_whole(self.path, json.dumps(record))
        except OSError as error:
            if self._written is None:
                logger.warning("! egress is lost with this daemon: %s: %s", self.path, error)
        self._written = spent
