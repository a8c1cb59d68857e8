"""The handshake: who two daemons are, and whether they run the same run. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geotrain.transport.frame import PROTOCOL_VERSION
from geotrain.transport.maps import differing_keys, get_int, get_list, get_map, get_str
from geotrain.transport.messages import MAX_COUNT, MAX_NAME_CHARS, MAX_STREAM

MAX_DIFFERING = 32
MAX_VALUE_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a daemon says of itself when a lane begins."""

    version: str
    """Of geotrain; regions run the same one."""
    run_id: str
    region: str
    index: int
    """Of the region in the line; where two lanes meet, the lower one's dial stays (P-13)."""
    to: str
    """The region this is meant for."""
    boot: int
    """When this daemon started, time_ns: tells a new lane of it from one of its predecessor."""
    run: Mapping[str, Any]
    """The [run] section with every default resolved, as plain values."""
    proto: int = PROTOCOL_VERSION

    def __post_init__(self) -> None:
        for name in ("version", "run_id", "region", "to"):
            if not 0 < len(getattr(self, name)) <= MAX_NAME_CHARS:
                raise ValueError(f"{name}: must be 1 to {MAX_NAME_CHARS} characters")
        if not 0 <= self.index <= MAX_STREAM:
            raise ValueError(f"index: {self.index}")
        if not 0 <= self.boot < 2**63 or not 0 <= self.proto <= MAX_COUNT:
            raise ValueError(f"boot: {self.boot}, proto: {self.proto}")

    def to_map(self) -> dict[str, Any]:
        return {
            "proto": self.proto,
            "version": self.version,
            "run_id": self.run_id,
            "region": self.region,
            "index": self.index,
            "to": self.to,
            "boot": self.boot,
            "run": dict(self.run),
        }

    @classmethod
    def from_map(cls, record: Mapping[Any, Any]) -> "Hello":
        """
        Raises:
            ValueError: A key is missing, of the wrong type or out of its limits.
        """
        return cls(
            proto=get_int(record, "proto"),
            version=get_str(record, "version"),
            run_id=get_str(record, "run_id"),
            region=get_str(record, "region"),
            index=get_int(record, "index"),
            to=get_str(record, "to"),
            boot=get_int(record, "boot"),
            run=get_map(record, "run") or {},
        )


Differing = tuple[tuple[str, Any, Any], ...]
"""(key, this side's value, the peer's value)."""


def disagreement(mine: Hello, theirs: Hello) -> tuple[str, Differing] | None:
    """Why these two must not be linked (P-3), with what differs; None where they agree."""
    top = [
        (name, getattr(mine, name), getattr(theirs, name))
        for name in ("proto", "version", "run_id")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    top += [
        (name, mine_value, theirs_value)
        for name, mine_value, theirs_value in (
            ("peer's name", mine.to, theirs.region),
            ("own name", mine.region, theirs.to),
        )
        if mine_value != theirs_value
    ]
    if mine.index == theirs.index:
        top.append(("index", mine.index, theirs.index))
    in_run = [
        (f"run.{key}", one, other) for key, one, other in differing_keys(mine.run, theirs.run)
    ]
    differing = [(key, _short(one), _short(other)) for key, one, other in top + in_run]
    if not differing:
        return None
    return reason_of(mine.region, theirs.region, differing), tuple(differing[:MAX_DIFFERING])


def reason_of(mine: str, theirs: str, differing: list[tuple[str, Any, Any]]) -> str:
    """One line for people: every key (up to a limit) with both values."""
    shown = [
        f"{key} is {one!r} in {mine}, {other!r} in {theirs}"
        for key, one, other in differing[:MAX_DIFFERING]
    ]
    more = len(differing) - len(shown)
    text = "; ".join(shown) + (f"; and {more} more" if more else "")
    if any(key in ("proto", "version") for key, _, _ in differing):
        text += "; install the same version of geotrain in both"
    return text


def read_refusal(record: Mapping[Any, Any]) -> tuple[str, Differing]:
    """A REFUSE map, seen from this side: the peer's "mine" is our "theirs".

    Raises:
        ValueError: Not such a map.
    """
    reason = get_str(record, "reason")[:4_096]
    rows = get_list(record, "differing", [])
    if len(rows) > MAX_DIFFERING:
        raise ValueError(f"differing: {len(rows)} keys, at most {MAX_DIFFERING}")
    differing: list[tuple[str, Any, Any]] = []
    for row in rows:
        if not (isinstance(row, list) and len(row) == 3 and isinstance(row[0], str)):
            raise ValueError("differing: must be triples of a key and two values")
        differing.append((row[0][:MAX_VALUE_CHARS], _short(row[2]), _short(row[1])))
    return reason, tuple(differing)


def _short(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
