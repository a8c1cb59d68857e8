"""What a stage does next, and the language in which what it did is written down.

An action prints as `0F3` (stage 0, forward of microbatch 3) or `1B2` (stage 1, backward of
microbatch 2) and parses back. The rule is the whole schedule: nothing is planned ahead, every
stage asks it after each action.
"""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B"]

_ACTION = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One forward or backward of one microbatch on one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that prints as `text`; ValueError for anything else."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r} (expected for example 0F3 or 1B2)")
        kind: Kind = "F" if match[2] == "F" else "B"
        return cls(stage=int(match[1]), kind=kind, microbatch=int(match[3]))


def next_kind(
    *, last: Kind | None, forward_ready: bool, backward_ready: bool, in_flight: int, window: int
) -> Kind | None:
    """The alternating rule: which kind of action a stage runs now, or None to wait.

    A forward is admissible while fewer than `window` microbatches are in flight. If a backward and
    an admissible forward are both ready, the kind that did not run last goes; otherwise whichever
    is ready. Taking backwards first instead looks natural and is a trap: with unequal stages it
    starves the stages behind, and a wider window can make it slower.
    """
    forward_admissible = forward_ready and in_flight < window
    if forward_admissible and backward_ready:
        return "B" if last == "F" else "F"
    if backward_ready:
        return "B"
    if forward_admissible:
        return "F"
    return None
