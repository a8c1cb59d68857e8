"""Reading a TOML file of ours: what stops it from being looked at any further."""

import difflib
import tomllib
from pathlib import Path
from typing import Any

from geotrain.configuration.problems import written
from geotrain.errors import ConfigError, Problem

CONFIG_VERSION = 1


def read_toml(file: Path, *, named_by: tuple[Path, str] | None = None) -> dict[str, Any]:
    """The tables of a file; ConfigError where there are none, at the key that named the file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, nested without end
        reason = f"is not valid TOML: {error}"
        named_by = None
    if named_by is None:
        problem = Problem(file=str(file), key="the file", value="", allowed=reason)
    else:
        where, value = named_by
        problem = Problem(file=str(where), key="run", value=written(value), allowed=reason)
    raise ConfigError([problem])


def check_version(file: Path, data: dict[str, Any], *, required: bool) -> None:
    """Raise ConfigError for another version, by itself: its keys may mean something else."""
    version = data.get("version")
    if version is None and not required:
        return
    if type(version) is int and version == CONFIG_VERSION:
        return
    allowed = f"this geotrain reads version = {CONFIG_VERSION} only"
    if version is None:
        near = difflib.get_close_matches("version", data, n=1)
        allowed = f"is missing; write version = {CONFIG_VERSION} at the top" + (
            f' (instead of "{near[0]}")' if near else ""
        )
    value = "" if version is None else written(version)
    raise ConfigError([Problem(file=str(file), key="version", value=value, allowed=allowed)])
