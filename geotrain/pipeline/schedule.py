"""What a stage does next, and the language in which what it did is written down.

An action prints as `0F3` (stage 0, forward of microbatch 3), `1B2` (stage 1, backward of
microbatch 2) or `1SEND_B2` (stage 1 sends the gradient of microbatch 2), and parses back. The rule
is the whole schedule: nothing is planned ahead, every stage asks it after each action.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

Compute = Literal["F", "B"]
"""What the rule chooses between."""
Kind = Literal["F", "B", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""W is the gradient of the weights where a stage computes it apart from that of its input."""

_ACTION = re.compile(rf"(\d+)({'|'.join(get_args(Kind))})(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What one stage does with one microbatch."""

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
            raise ValueError(f"not an action: {text!r} (expected for example 0F3 or 1SEND_B2)")
        return cls(stage=int(match[1]), kind=cast(Kind, match[2]), microbatch=int(match[3]))


def parse_row(text: str) -> list[Action]:
    """One stage's actions in order, as `print_row` writes them; ValueError for anything else."""
    return [Action.parse(word) for word in text.split()]


def print_row(actions: Iterable[Action]) -> str:
    """Actions in order, such as "1RECV_F0 1F0 1B0 1SEND_B0"."""
    return " ".join(str(action) for action in actions)


def next_kind(
    *, last: Kind | None, forward_ready: bool, backward_ready: bool, in_flight: int, window: int
) -> Compute | None:
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
