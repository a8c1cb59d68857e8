"""Whether a schedule can be run as it stands: legal, within its windows, free of deadlock.

What is wrong is shown in the grid of all stages, with the faulty cell in brackets.
"""

from collections import Counter
from collections.abc import Sequence

from geotrain.pipeline.schedule import Action, Kind
from geotrain.pipeline.timed import Trace

_AROUND = 4
"""Cells shown on either side of a faulty one."""
_TOLERANCE_S = 1e-6

_ALWAYS: set[Kind] = {"F", "B"}
_AHEAD: dict[Kind, tuple[Kind, ...]] = {
    "F": ("RECV_F",),
    "SEND_F": ("F",),
    "B": ("F", "RECV_B"),
    "W": ("B",),
    "SEND_B": ("B",),
}
"""What must have run in the same stage for the same microbatch, where the row has it."""

Rows = Sequence[Sequence[Action]]


class ScheduleError(ValueError):
    """A schedule that cannot be run; the text has the reason and the grid."""

    def __init__(self, reason: str, *, rows: Rows, stage: int, cell: int) -> None:
        super().__init__(f"{reason}\n{grid(rows, stage=stage, cell=cell)}")
        self.reason = reason
        self.stage = stage
        self.cell = cell
        """Index into the stage's row; its length where something is missing at the end."""


def grid(rows: Rows, *, stage: int, cell: int) -> str:
    """The rows around one cell, which stands in brackets."""
    first = max(0, cell - _AROUND)
    last = cell + _AROUND + 1
    lines = []
    for index, row in enumerate(rows):
        words = [str(action) for action in row[first:last]]
        if index == stage:
            place = cell - first
            words += ["(end)"] * (place >= len(words))
            words[place] = f"[{words[place]}]"
        before = "... " if 0 < first < len(row) else ""
        after = " ..." if len(row) > last else ""
        lines.append(f"stage {index}: {before}{' '.join(words)}{after}")
    return "\n".join(lines)


def validate(rows: Rows, *, num_microbatches: int, windows: Sequence[int]) -> None:
    """Check the order of each stage's actions, and that all stages together come to the end.

    Where a row names its sending and receiving (SEND_F and the like), these must be in place;
    where it does not, tensors are taken to travel by themselves.

    Raises:
        ScheduleError: With the grid and the faulty cell.
    """
    for stage in range(len(rows)):
        _check_row(rows, stage, num_microbatches, windows[stage])
    _check_progress(rows)


def _check_row(rows: Rows, stage: int, num_microbatches: int, window: int) -> None:
    done: set[tuple[Kind, int]] = set()
    counts: Counter[Kind] = Counter()
    named = {action.kind for action in rows[stage]}
    nobody = {"RECV_F", "SEND_B"} if stage == 0 else set()
    nobody |= {"SEND_F", "RECV_B"} if stage == len(rows) - 1 else set()
    for cell, action in enumerate(rows[stage]):
        kind, microbatch = action.kind, action.microbatch
        expected = Action(stage=stage, kind=kind, microbatch=counts[kind])
        missing = [
            Action(stage=stage, kind=needed, microbatch=microbatch)
            for needed in _AHEAD.get(kind, ())
            if needed in named | {"F", "B"} and (needed, microbatch) not in done
        ]
        counts[kind] += 1
        in_flight = counts["F"] - counts["B"]
        if action.stage != stage:
            reason = f"{action} stands in the row of stage {stage}"
        elif microbatch >= num_microbatches:
            reason = f"{action}: there are only {num_microbatches} microbatches"
        elif kind in nobody:
            reason = f"{action}: stage {stage} has no neighbour there"
        elif (kind, microbatch) in done:
            reason = f"{action} runs twice"
        elif action != expected:
            reason = f"{action} out of order: {expected} is next"
        elif missing:
            reason = f"{action} before {missing[0]}"
        elif in_flight > window:
            reason = f"{action} makes {in_flight} in flight, the window is {window}"
        else:
            done.add((kind, microbatch))
            continue
        raise ScheduleError(reason, rows=rows, stage=stage, cell=cell)
    for each in sorted(_ALWAYS | named):
        if counts[each] < num_microbatches:
            lacking = Action(stage=stage, kind=each, microbatch=counts[each])
            raise ScheduleError(
                f"{lacking} is missing", rows=rows, stage=stage, cell=len(rows[stage])
            )


def _check_progress(rows: Rows) -> None:
    """Run the rows against each other: each waits for its neighbours' actions, nothing else."""
    needs = _needs_elsewhere(rows)
    done: set[Action] = set()
    cells = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while cells[stage] < len(row):
                action = row[cells[stage]]
                if action in needs and needs[action] not in done:
                    break
                done.add(action)
                cells[stage] += 1
                moved = True
    for stage, row in enumerate(rows):
        if cells[stage] < len(row):
            action = row[cells[stage]]
            reason = f"deadlock: {action} waits for {needs[action]}, which never runs"
            raise ScheduleError(reason, rows=rows, stage=stage, cell=cells[stage])


def _needs_elsewhere(rows: Rows) -> dict[Action, Action]:
    """For each action that takes something from a neighbour, the neighbour's action."""
    named = [{action.kind for action in row} for row in rows]
    found = {}
    for stage, row in enumerate(rows):
        takes: dict[Kind, tuple[int, Kind, Kind]] = {
            "RECV_F" if "RECV_F" in named[stage] else "F": (stage - 1, "SEND_F", "F"),
            "RECV_B" if "RECV_B" in named[stage] else "B": (stage + 1, "SEND_B", "B"),
        }
        for action in row:
            if action.kind in takes:
                other, sending, computing = takes[action.kind]
                if 0 <= other < len(rows):
                    kind = sending if sending in named[other] else computing
                    found[action] = Action(stage=other, kind=kind, microbatch=action.microbatch)
    return found


def validate_trace(trace: Trace, *, num_microbatches: int, windows: Sequence[int]) -> None:
    """Check a trace's computing as `validate` does, and its times as well.

    All times must be of one clock, as those of a simulation are.

    Raises:
        ScheduleError: With the grid and the faulty cell.
    """
    computing = trace.computing()
    rows = computing.rows()
    validate(rows, num_microbatches=num_microbatches, windows=windows)
    needs = _needs_elsewhere(rows)
    ends = {timed.action: timed.end_s for timed in computing.actions}
    for stage in range(len(rows)):
        free_s = 0.0
        for cell, timed in enumerate(computing.row(stage)):
            reason = ""
            needed = needs.get(timed.action)
            if timed.begin_s < free_s - _TOLERANCE_S:
                reason = f"{timed.action} begins before the action ahead of it ends"
            elif needed is not None and timed.begin_s < ends[needed] - _TOLERANCE_S:
                reason = f"{timed.action} begins before {needed} ends"
            elif timed.end_s < timed.begin_s:
                reason = f"{timed.action} ends before it begins"
            if reason:
                raise ScheduleError(reason, rows=rows, stage=stage, cell=cell)
            free_s = timed.end_s
