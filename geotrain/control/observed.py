"""What the regions' reports of the last steps come to: the costs that a plan rests on."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from geotrain.control.costs import (
    DirectionCosts,
    LinkCosts,
    StageCosts,
    direction_costs,
    round_trip_s,
)
from geotrain.control.figures import RECORD, Figures, Hold, Matches, Passage, Trip

_FEW = 8
"""With fewer deliveries than this of the newest step, those known of the one before count too."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The costs of the whole line, at one number of microbatches."""

    stages: tuple[StageCosts, ...]
    links: tuple[LinkCosts, ...]

    @property
    def slowest_s(self) -> float:
        return max(stage.both_s for stage in self.stages)

    def figures(self, names: Sequence[str]) -> dict[str, float]:
        """Every figure in seconds, under the name that the log has for it."""
        found = {}
        for index, link in enumerate(self.links):
            found[f"delivery to {names[index + 1]}"] = link.forward.delivery_s
            back = f"delivery to {names[index]} from {names[index + 1]}"
            found[back] = link.backward.delivery_s
        for name, stage in zip(names, self.stages, strict=True):
            found[f"a microbatch in {name}"] = stage.both_s
        return found


class Observed:
    """Takes in one step's reports after the other."""

    def __init__(self, num_stages: int) -> None:
        self._stages: list[StageCosts | None] = [None] * num_stages
        self._ways = [(_Way(), _Way()) for _ in range(num_stages - 1)]
        self.num_steps = 0

    def restart(self, step: int) -> None:
        """Microbatches have another size from `step` on: what was seen before says nothing."""
        self._stages = [None] * len(self._stages)
        for way in (way for pair in self._ways for way in pair):
            way.restart(step)

    def take_in(self, step: int, figures: Sequence[Figures]) -> None:
        """One report of each region, in order."""
        self.num_steps += 1
        for index, own in enumerate(figures):
            forward_s, backward_s = _seconds(own.forward_us), _seconds(own.backward_us)
            if self.num_steps == 1:
                forward_s, backward_s = _warm(forward_s), _warm(backward_s)
            if forward_s:
                # A region that trains nothing may have no backwards.
                self._stages[index] = StageCosts(
                    forward_s=forward_s, backward_s=backward_s or (0.0,)
                )
        for index, (down, up) in enumerate(self._ways):
            upper, lower = figures[index], figures[index + 1]
            down.take_in(step, upper.sent_down, lower.held_from_up, upper.slots_down)
            up.take_in(step, lower.sent_up, upper.held_from_down, lower.slots_up)

    def seen(self) -> Seen | None:
        """The costs in the last step; None until every stage and every link has shown itself."""
        links = [_link_costs(down, up) for down, up in self._ways]
        if None in links or None in self._stages:
            return None
        return Seen(
            stages=tuple(stage for stage in self._stages if stage is not None),
            links=tuple(link for link in links if link is not None),
        )


def _seconds(times_us: Sequence[int]) -> tuple[float, ...]:
    return tuple(us / 1e6 for us in times_us)


def _warm(values: Sequence[_T]) -> tuple[_T, ...]:
    """The later half: caches, allocators and congestion windows fill as the first step runs."""
    return tuple(values[len(values) // 2 :])


class _Way:
    """One direction of a boundary: the trips of the last steps."""

    def __init__(self) -> None:
        self._matches = Matches()
        self._recent: deque[Sequence[Trip]] = deque(maxlen=2)
        self._slots: int | None = None
        self._first_step = 0

    def restart(self, step: int) -> None:
        self._recent.clear()
        self._first_step = step

    def take_in(
        self, step: int, passages: Sequence[Passage], holds: Sequence[Hold], slots: int
    ) -> None:
        found = self._matches.add(passages, holds, step=step)
        trips = [
            each for each in found if each.microbatch == RECORD or each.step >= self._first_step
        ]
        if trips and not self._recent:
            records = [trip for trip in trips if trip.microbatch == RECORD]
            trips = [*records, *_warm([trip for trip in trips if trip.microbatch != RECORD])]
        if trips:
            self._recent.append(trips)
        self._slots = slots or None

    @property
    def trips(self) -> list[Trip]:
        """Of the newest step alone, so that a link that changed shows as it is now.

        Those of the step before whose acknowledgement came late count where there are too few.
        """
        last = self._recent[-1] if self._recent else ()
        newest = max((trip.step for trip in last if trip.microbatch != RECORD), default=0)
        own = [trip for trip in last if trip.microbatch == RECORD or trip.step == newest]
        return own if len(own) >= _FEW else [trip for trips in self._recent for trip in trips]

    def costs(self, rtt_s: float) -> DirectionCosts | None:
        return direction_costs(self.trips, rtt_s=rtt_s, slots=self._slots)


def _link_costs(down: _Way, up: _Way) -> LinkCosts | None:
    rtt_s = round_trip_s(down.trips, up.trips)
    if rtt_s is None:
        return None
    forward, backward = down.costs(rtt_s), up.costs(rtt_s)
    if forward is None:
        return None
    # No gradient flows into a region that trains nothing; what it would cost does not matter.
    return LinkCosts(forward=forward, backward=backward or forward)
