"""How log lines look: plain for people, JSON for machines.

`GEOTRAIN_LOG=json` writes one object a line, `GEOTRAIN_LOG_LEVEL` is the level (INFO).
"""

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TextIO

from geotrain.errors import ConfigError

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORMATS = ("plain", "json")


class PlainFormatter(logging.Formatter):
    """`12:03:04 geotrain.link < frankfurt: connected`; warnings and worse say so."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(place)s %(grade)s%(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        # The package between ours and the module tells a reader of logs nothing.
        first, *between = record.name.split(".")
        record.place = f"{first}.{between[-1]}" if between else first
        worse = record.levelno >= logging.WARNING
        record.grade = f"{record.levelname.lower()}: " if worse else ""
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _OwnHandler(logging.StreamHandler[TextIO]):
    """Steps aside once the program sets up logging itself, so that no line comes twice."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def setup_logging(
    *,
    also: Sequence[str] = (),
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Write geotrain's log lines to stderr, unless the program has its own handlers.

    Calling it again replaces the handler.

    Args:
        also: Other loggers that this process owns, such as "aiohttp" in the daemon; warnings only.
        stream: Where lines go instead of stderr.
        environ: Where GEOTRAIN_LOG and GEOTRAIN_LOG_LEVEL are looked up.

    Raises:
        ConfigError: One of the two variables has a value that means nothing.
    """
    level = environ.get("GEOTRAIN_LOG_LEVEL", "").upper() or "INFO"
    form = environ.get("GEOTRAIN_LOG", "").lower() or "plain"
    for name, value, choices in (
        ("GEOTRAIN_LOG_LEVEL", level, _LEVELS),
        ("GEOTRAIN_LOG", form, _FORMATS),
    ):
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)} (got {value})")
    handler = _OwnHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else PlainFormatter())
    _attach("geotrain", handler, level)
    for name in also:
        _attach(name, handler, "WARNING")


def _attach(name: str, handler: logging.Handler, level: str) -> None:
    logger = logging.getLogger(name)
    for other in [known for known in logger.handlers if isinstance(known, _OwnHandler)]:
        logger.removeHandler(other)
    logger.addHandler(handler)
    logger.setLevel(level)
