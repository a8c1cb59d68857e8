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


def take_version(file: Path, data: dict[str, Any], *, required: bool) -> list[Problem]:
    """Take `version` out of a file's tables, or what was meant as it. Returns what is wrong.

    The other keys are judged all the same: a user sees every problem at once.
    """
    if "version" in data:
        version = data.pop("version")
        if type(version) is int and version == CONFIG_VERSION:
            return []
        allowed, value = f"this geotrain reads version = {CONFIG_VERSION} only", written(version)
    elif required:
        allowed, value = f"is missing; write version = {CONFIG_VERSION} at the top", ""
        near = difflib.get_close_matches("version", data, n=1)
        if near:  # told here, and not again as an unknown key
            allowed += f' (instead of "{near[0]}")'
            del data[near[0]]
    else:
        return []
    return [Problem(file=str(file), key="version", value=value, allowed=allowed)]
