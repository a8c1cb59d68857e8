"""Figures and actions in the few characters that a table's cell has. Pure."""

import re
from collections.abc import Mapping

_ACTION = re.compile(r"^(forward|backward) \d+[FB](\d+) of (?:step|evaluation batch) \d+$")
_WAITING = re.compile(r"^waiting for (.+?)(?: of step \d+)?$")


_SHORT = {
    "link_delay": "delay",
    "link_rate": "rate",
    "imbalance": "others",
    "collectives": "ranks",
    "optimizer": "optim.",
    "user_code": "script",
    "runtime": "own",
}
"""Of what a step went into; the other names are short as they are."""


def action(text: str) -> str:
    """What a rank posted, without what the rest of the view says already.

    "forward 0F3 of step 12" is "forward 3", and "waiting for backward 2 of step 12" is
    "waits: backward 2".
    """
    if match := _ACTION.match(text):
        return f"{match[1]} {match[2]}"
    if match := _WAITING.match(text):
        return f"waits: {match[1]}"
    return text


def shortened(name: str, width: int) -> str:
    """A name in at most `width` characters."""
    return name if len(name) <= width else f"{name[: width - 2]}.."


def count(value: float) -> str:
    """Such as "950", "5.84 k", "1.20 M"."""
    for unit in ("", " k", " M"):
        if value < 1000:
            return f"{value:.0f}" if not unit else f"{value:.2f}{unit}"
        value /= 1000
    return f"{value:.2f} G"


def size(num_bytes: float) -> str:
    """In powers of 1,000, as egress is billed."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def saved(payload_bytes: float, wire_bytes: float) -> str:
    """What coding kept off the wire; "-" where it kept nothing off."""
    kept_off = payload_bytes - wire_bytes
    if payload_bytes <= 0 or kept_off <= 0:
        return "-"
    return f"{size(kept_off)} {kept_off / payload_bytes:.0%}"


def saved_share(payload_bytes: float, wire_bytes: float) -> str:
    """The same in fewer characters."""
    return saved(payload_bytes, wire_bytes).split()[-1]


def dollars(usd: float) -> str:
    """With as many decimals as a small sum needs; "-" for one that they would not show."""
    if usd < 5e-6:
        return "-"
    return f"{usd:.2f}" if usd >= 1 else f"{usd:.5f}"


def mbit(bytes_per_s: float | None) -> str:
    """As links are sold, without the unit."""
    return "-" if bytes_per_s is None else f"{bytes_per_s * 8e-6:.0f}"


def largest_wait(spent_s: Mapping[str, float]) -> str:
    """What most of a region's step went into besides computing, such as "drain 14%"."""
    step_s = sum(spent_s.values())
    others = {cause: s for cause, s in spent_s.items() if cause != "compute"}
    cause = max(others, key=others.__getitem__, default="")
    if not cause or step_s <= 0 or others[cause] < 0.005 * step_s:
        return "-"
    return f"{_SHORT.get(cause, cause)} {others[cause] / step_s:.0%}"
