"""With plan.window = "auto" the windows follow what the regions measure and put in their votes.

With plan.replay they are those of another run, from the file that its first region wrote.
"""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from geotrain.control.controller import Controller
from geotrain.control.figures import MAX_ENTRIES, RECORD, Figures, Hold, Passage
from geotrain.control.journal import Entry, Journal
from geotrain.control.votes import Vote
from geotrain.pipeline.context import Context
from geotrain.pipeline.edge import Edge
from geotrain.pipeline.memory import ActivationMeter, bytes_to_come, memory_limit, spare_bytes
from geotrain.pipeline.opening import Opening
from geotrain.pipeline.runtime import Account
from geotrain.pipeline.schedule import Kind
from geotrain.pipeline.stage import Stage
from geotrain.pipeline.window import classic_windows, resolve_windows
from geotrain.transport.attachment_times import Hold as StreamHold
from geotrain.transport.attachment_times import Passage as StreamPassage

logger = logging.getLogger(__name__)

_OPENING = "begin"
"""The record that opens a step: the only one that has the link to itself."""

_Entry = TypeVar("_Entry", bound=StreamPassage | StreamHold)


class Following:
    """This region's part in it: every region measures, the first one decides."""

    def __init__(self, context: Context, stage: Stage) -> None:
        self._context = context
        self._meter: ActivationMeter | None = None
        self._kept_bytes: dict[int, int] = {}
        """What a microbatch in flight keeps in memory at most, by the count that they were."""
        self._spare_bytes: int | None = None
        """Memory that was free before the first microbatch."""
        self._first_room: int | None = None
        self._controller: Controller | None = None
        self._replayed: Journal | None = None
        self._written: tuple[int, tuple[int, ...]] | None = None
        self._why = "as the run began"
        is_auto = context.place.window == "auto" and context.place.replay is None
        self._is_on = is_auto and len(context.place.region_names) > 1
        if self._is_on:
            segment = context.parts.segment
            self._meter = stage.meter = ActivationMeter(
                [*segment.parameters(), *segment.buffers()], device=context.place.device
            )
        if self._is_on and context.place.is_first:
            counts = context.place.num_microbatches == "auto"
            self._controller = Controller(context.place.region_names, counts=counts)

    def before(self, step: int) -> None:
        """Take up the plan of a step that the first region is about to open, and note it down."""
        context, place = self._context, self._context.place
        if not place.is_first:
            return
        if place.replay is not None:
            if self._replayed is None:
                self._replayed = read_journal(context, place.replay)
            entry = self._replayed.at(step)
            if entry is None or len(entry.windows) != len(place.region_names):
                raise context.error(
                    "mismatch",
                    f"{place.replay} has no plan of step {step} for {len(place.region_names)} "
                    f"regions; give plan.replay the file of a run like this one, or remove it",
                )
            context.num_microbatches, context.window = entry.num_microbatches, entry.windows
        if place.plan_log is not None:
            self._note(step, place.plan_log)

    def _note(self, step: int, file: Path) -> None:
        windows = resolve_windows(
            self._context.window,
            num_stages=len(self._context.place.region_names),
            num_microbatches=self._context.num_microbatches,
        )
        plan = (self._context.num_microbatches, windows)
        if plan == self._written:
            return
        entry = Entry(step=step, num_microbatches=plan[0], windows=windows, why=self._why)
        try:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(entry.to_line())
        except OSError as exc:
            raise self._context.error("config", f"site.plan_log {file}: {exc.strerror}") from exc
        self._written = plan

    def room(self) -> int:
        """The most microbatches in flight that memory has room for, until a plan rests on it.

        The first step's windows are as wide as can be, so that it waits for no link. Its first
        microbatch shows what each of them keeps; until then it is as with 1F1B.
        """
        if self._meter is None or self._kept_bytes:
            return sys.maxsize
        if self._first_room is not None:
            return self._first_room
        kept_bytes, place = self._meter.seen_bytes, self._context.place
        least = classic_windows(len(place.region_names))[place.index]
        if kept_bytes is None:
            if self._spare_bytes is None:
                self._spare_bytes = self._spare()
            return least
        most = memory_limit(kept_bytes, spare_bytes=self._spare_bytes, least=least)
        self._first_room = most or sys.maxsize
        return self._first_room

    def _spare(self) -> int | None:
        """Memory for activations, while there are none."""
        free_bytes = spare_bytes(self._context.place.device)
        if free_bytes is None:
            return None
        parameters = self._context.parts.segment.parameters()
        to_come = bytes_to_come(parameters, is_first_step=not self._kept_bytes)
        return max(0, free_bytes - to_come)

    def figures(self, account: Account, opening: Opening) -> Figures | None:
        """What this region's vote says of the step just run."""
        if self._meter is None:
            return None
        place, count = self._context.place, opening.work.num_microbatches
        kept_bytes = max(self._meter.take(), self._kept_bytes.get(count, 0))
        free_bytes = self._spare()
        self._kept_bytes[count] = kept_bytes
        room = memory_limit(
            kept_bytes,
            spare_bytes=free_bytes,
            least=classic_windows(len(place.region_names))[place.index],
        )
        if place.in_flight_samples is not None and count:
            own = max(1, place.in_flight_samples // -(-opening.num_samples // count))
            room = min(room, own) if room else own
        return measure(self._context, account, memory_limit=room, now=time.monotonic())

    def on_votes(self, votes: Sequence[Vote], opening: Opening) -> None:
        """Choose the windows of the next step; it announces them, so that all have the same."""
        if self._controller is None:
            return
        ordered = sorted(votes, key=lambda vote: vote.region)
        change = self._controller.on_step(
            opening.number,
            [vote.figures or Figures() for vote in ordered],
            windows=opening.windows,
            num_microbatches=opening.work.num_microbatches,
            num_samples=opening.num_samples,
        )
        if change is not None:
            self._context.window = change.plan.windows
            if self._context.place.num_microbatches == "auto":
                self._context.num_microbatches = change.plan.num_microbatches
            self._why = change.text
            logger.info("%s", change.text)


def read_journal(context: Context, file: Path) -> Journal:
    """The plans to repeat. Raises RegionError where the file cannot be read, or is none such."""
    try:
        return Journal.parse(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise context.error("config", f"run.plan.replay {file}: {exc.strerror}") from exc
    except ValueError as exc:
        raise context.error("config", f"run.plan.replay {file}: {exc}") from exc


def measure(context: Context, account: Account, *, memory_limit: int, now: float) -> Figures:
    """The figures of the step just run, and of what was acknowledged since the last ones.

    Args:
        now: Monotonic seconds, from which times are counted.
    """
    up, down = context.parts.upstream, context.parts.downstream
    sent_up, held_from_up = _times(up, "backward", "forward", now)
    sent_down, held_from_down = _times(down, "forward", "backward", now)
    return Figures(
        forward_us=_durations_us(account, "F"),
        backward_us=_durations_us(account, "B"),
        sent_down=sent_down,
        sent_up=sent_up,
        held_from_up=held_from_up,
        held_from_down=held_from_down,
        in_flight_limit=context.place.in_flight_limit or 0,
        memory_limit=memory_limit,
        slots_down=down.slots if down is not None else 0,
        slots_up=up.slots if up is not None else 0,
    )


def _durations_us(account: Account, kind: Kind) -> tuple[int, ...]:
    times = [_us(ran.end_s - ran.begin_s) for ran in account.trace if ran.kind == kind]
    return tuple(times[:MAX_ENTRIES])


def _times(
    edge: Edge | None, sent: str, received: str, now: float
) -> tuple[tuple[Passage, ...], tuple[Hold, ...]]:
    """Both ends that this region has of a boundary's traffic, of the kinds given."""
    if edge is None:
        return (), ()
    passages, holds = edge.take_times()
    return (
        tuple(
            Passage(e.step, _number(e), _us(e.sent_s - now), _us(e.acked_s - e.sent_s))
            for e in _wanted(passages, sent)
        ),
        tuple(Hold(e.step, _number(e), _us(e.held_s)) for e in _wanted(holds, received)),
    )


def _wanted(entries: Sequence[_Entry], kind: str) -> list[_Entry]:
    """Those of a kind, and the newest opening: at most as many as a report may have."""
    openings = [entry for entry in entries if entry.kind == _OPENING]
    tensors = [entry for entry in entries if entry.kind == kind]
    return [*openings[-1:], *tensors[: MAX_ENTRIES - 1]]


def _number(entry: StreamPassage | StreamHold) -> int:
    return RECORD if entry.kind == _OPENING else entry.microbatch


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
