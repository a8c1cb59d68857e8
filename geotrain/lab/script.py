"""Scripts of timed changes: what the weather on the links will be.

[[change]]
at_s = 10
between = ["virginia", "frankfurt"]     # or from = "...", to = "..."; without: every link
rtt_ms = 250
loss = 0.001
why = "the submarine cable is repaired"
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geotrain.errors import ConfigError
from geotrain.lab.settings import USER_KEYS, Direction, LinkSettings, Selection, in_base_units

MAX_SCRIPT_BYTES = 1 << 20
MAX_AT_S = 1e7
_OWN_KEYS = {"at_s", "between", "from", "to", "why"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One entry of a script."""

    at_s: float
    """Since the script was started."""
    selection: Selection = field(default_factory=Selection)
    settings: Mapping[str, Any]
    """Fields of LinkSettings; the others stay as they are."""
    why: str = ""

    def __str__(self) -> str:
        what = ", ".join(f"{name} {value:g}" for name, value in self.settings.items() if value)
        off = ", ".join(f"no {name}" for name, value in self.settings.items() if not value)
        text = f"at {self.at_s:g} s {self.selection}: {', '.join(filter(None, (what, off)))}"
        return f"{text} ({self.why})" if self.why else text


def read_script(path: Path) -> str:
    """The text of a script file. ConfigError where it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
        if len(content) > MAX_SCRIPT_BYTES:
            raise ConfigError(f"the script {path} is larger than {MAX_SCRIPT_BYTES >> 20} MiB")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the script {path}: {error}") from error


def parse_script(text: str, *, file: str, directions: Sequence[Direction]) -> list[Change]:
    """The changes in the order of their times. ConfigError names the entry and the remedy."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    entries = document.get("change", [])
    if set(document) - {"change"} or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{file}: a script is a list of [[change]] entries and nothing else")
    changes = []
    for number, entry in enumerate(entries, start=1):
        try:
            changes.append(_change_of(entry, directions))
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{file}: change {number}: {error}") from error
    return sorted(changes, key=lambda change: change.at_s)


def _change_of(entry: Mapping[str, Any], directions: Sequence[Direction]) -> Change:
    unknown = sorted(entry.keys() - _OWN_KEYS - set(USER_KEYS))
    if unknown:
        allowed = ", ".join((*sorted(_OWN_KEYS), *USER_KEYS))
        raise ConfigError(f"unknown key {', '.join(unknown)}; there are: {allowed}")
    at_s = entry.get("at_s")
    if not isinstance(at_s, int | float) or not _is_number(at_s) or not 0 <= at_s <= MAX_AT_S:
        raise ConfigError(f"at_s must be a number of seconds from 0 to {MAX_AT_S:g}")
    written = {key: entry[key] for key in USER_KEYS if key in entry}
    for key, value in written.items():
        if not (isinstance(value, bool) if key == "cut" else _is_number(value)):
            raise ConfigError(f"{key} must be {'true or false' if key == 'cut' else 'a number'}")
    if not written:
        raise ConfigError(f"it changes nothing; give one of {', '.join(USER_KEYS)}")
    settings = in_base_units(written)
    LinkSettings().changed(settings)  # so that what cannot be is refused before it is due
    selection = _selection_of(entry)
    selection.pick(directions)
    return Change(at_s=at_s, selection=selection, settings=settings, why=str(entry.get("why", "")))


def _selection_of(entry: Mapping[str, Any]) -> Selection:
    between = entry.get("between")
    if between is None:
        return Selection(source=entry.get("from"), target=entry.get("to"))
    if "from" in entry or "to" in entry:
        raise ConfigError("give between, or from and to, not both")
    if not isinstance(between, list) or len(between) != 2:
        raise ConfigError('between must be two sites, as in ["a", "b"]')
    return Selection(source=between[0], target=between[1], both=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
