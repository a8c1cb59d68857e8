"""With plan.window = "auto" the windows follow what the regions measure and put in their votes."""

import logging
import time
from collections.abc import Sequence
from typing import TypeVar

from geotrain.control.controller import Controller
from geotrain.control.figures import MAX_ENTRIES, RECORD, Figures, Hold, Passage
from geotrain.control.votes import Vote
from geotrain.pipeline.context import Context
from geotrain.pipeline.edge import Edge
from geotrain.pipeline.memory import ActivationMeter, memory_limit, spare_bytes
from geotrain.pipeline.opening import Opening
from geotrain.pipeline.runtime import Account
from geotrain.pipeline.schedule import Kind
from geotrain.pipeline.stage import Stage
from geotrain.pipeline.window import classic_windows
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
        self._metered_count: int | None = None
        self._controller: Controller | None = None
        self._is_on = context.place.window == "auto" and len(context.place.region_names) > 1
        if self._is_on:
            segment = context.parts.segment
            self._meter = stage.meter = ActivationMeter(
                [*segment.parameters(), *segment.buffers()], device=context.place.device
            )
        if self._is_on and context.place.is_first:
            counts = context.place.num_microbatches == "auto"
            self._controller = Controller(context.place.region_names, counts=counts)

    def figures(self, account: Account, opening: Opening) -> Figures | None:
        """What this region's vote says of the step just run."""
        if self._meter is None:
            return None
        place, count = self._context.place, opening.work.num_microbatches
        if self._metered_count not in (None, count):
            self._meter.most_bytes = 0  # of microbatches of another size; the next step knows
        self._metered_count = count
        room = memory_limit(
            self._meter,
            spare_bytes=spare_bytes(place.device),
            least=classic_windows(len(place.region_names))[place.index],
        )
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
            self._context.num_microbatches = change.plan.num_microbatches
            logger.info("%s", change.text)


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
    times = [_us(end - begin) for action, begin, end in account.trace if action.kind == kind]
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
