import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from geotrain.errors import ConfigError
from geotrain.observability.log import JsonFormatter, PlainFormatter, setup_logging


@contextmanager
def alone() -> Iterator[logging.Logger]:
    """The root logger without pytest's handlers, and ours gone afterwards."""
    root = logging.getLogger()
    loggers = [logging.getLogger(name) for name in ("geotrain", "aiohttp")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in (root, *loggers)]
    root.handlers[:] = []
    try:
        yield root
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers


def record(level: int = logging.INFO, name: str = "geotrain.transport.link") -> logging.LogRecord:
    made = logging.LogRecord(name, level, __file__, 1, "< %s: connected", ("frankfurt",), None)
    made.created = 1_700_000_000.25
    return made


@pytest.mark.parametrize(
    ("level", "name", "line"),
    [
        (logging.INFO, "geotrain.transport.link", "geotrain.link < frankfurt: connected"),
        (logging.INFO, "geotrain", "geotrain < frankfurt: connected"),
        (logging.ERROR, "aiohttp.server", "aiohttp.server error: < frankfurt: connected"),
    ],
)
def test_plain_line(level, name, line):
    time_of_day, rest = PlainFormatter().format(record(level, name)).split(" ", 1)
    assert rest == line
    assert [len(part) for part in time_of_day.split(":")] == [2, 2, 2]


def test_json_line():
    line = json.loads(JsonFormatter().format(record()))
    assert line.pop("pid") > 0
    assert line == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "INFO",
        "logger": "geotrain.transport.link",
        "message": "< frankfurt: connected",
    }


def test_json_line_carries_the_traceback():
    stream = io.StringIO()
    with alone():
        setup_logging(stream=stream, environ={"GEOTRAIN_LOG": "json"})
        try:
            raise ValueError("odd")
        except ValueError:
            logging.getLogger("geotrain.region").exception("failed")
    line = json.loads(stream.getvalue())
    assert line["message"] == "failed"
    assert line["exception"].endswith("ValueError: odd")


def test_level_comes_from_the_environment():
    stream = io.StringIO()
    with alone():
        setup_logging(stream=stream, environ={"GEOTRAIN_LOG_LEVEL": "warning"})
        logging.getLogger("geotrain.region").info("quiet")
        logging.getLogger("geotrain.region").warning("loud")
    assert stream.getvalue().endswith(" geotrain.region warning: loud\n")
    assert "quiet" not in stream.getvalue()


def test_other_loggers_of_the_process_bring_warnings_only():
    stream = io.StringIO()
    with alone():
        setup_logging(also=("aiohttp",), stream=stream, environ={})
        logging.getLogger("aiohttp").info("GET /status")
        logging.getLogger("aiohttp").warning("odd request")
    assert stream.getvalue().endswith(" aiohttp warning: odd request\n")
    assert "GET" not in stream.getvalue()


def test_setting_up_twice_prints_each_line_once():
    first, second = io.StringIO(), io.StringIO()
    with alone():
        setup_logging(stream=first, environ={})
        setup_logging(stream=second, environ={})
        logging.getLogger("geotrain").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_a_program_with_its_own_handlers_gets_no_line_twice():
    ours, theirs = io.StringIO(), io.StringIO()
    with alone() as root:
        setup_logging(stream=ours, environ={})
        root.addHandler(logging.StreamHandler(theirs))
        logging.getLogger("geotrain").info("once")
    assert (ours.getvalue(), theirs.getvalue()) == ("", "once\n")


@pytest.mark.parametrize(
    ("name", "value"), [("GEOTRAIN_LOG", "xml"), ("GEOTRAIN_LOG_LEVEL", "loud")]
)
def test_values_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be one of"):
        setup_logging(environ={name: value})
