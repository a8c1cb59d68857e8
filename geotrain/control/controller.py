"""When the plan changes, and why: runs in the first region, at the end of each step.

What the regions measured goes in, one step after the other; out come new windows, seldom. A
change needs figures that moved by more than their own noise, in two steps running, and a gain.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from geotrain.control.costs import (
    DirectionCosts,
    LinkCosts,
    StageCosts,
    direction_costs,
    pipeline_model,
    round_trip_s,
)
from geotrain.control.figures import RECORD, Figures, Hold, Matches, Passage, Trip
from geotrain.control.planner import Bound, Limits, Plan, Trial, choose_plan

CONFIRM_STEPS = 2
"""Steps in which figures must have moved: one slow step is no change of the link."""
COOL_DOWN_STEPS = 3
"""Between two changes, so that the second sees what the first did."""
MOVED_SHARE = 0.2
"""Of a delivery's time, or of a stage's: less is noise."""
MOVED_MICROBATCHES = 0.34
"""Of the slowest stage's time for one; a delivery that moved by less hardly moves a window."""
GAIN = 0.02
"""What new windows must save of a step, unless they are much narrower."""
NARROWER = 0.75
"""Windows whose sum is below this share of the old ones' free memory that is worth a change."""
_SETTLING_STEPS = 2
"""From the start: the first plan rests on half a step in which everything warmed up."""
_STAGE_STEPS = 3
_FEW = 16
"""With fewer deliveries than this in a step, those of the step before count as well."""


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New windows and the line that the log has for them."""

    plan: Plan
    bound: Bound
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """All that a plan rests on."""

    stages: tuple[StageCosts, ...]
    links: tuple[LinkCosts, ...]

    @property
    def slowest_s(self) -> float:
        return max(stage.both_s for stage in self.stages)


class Controller:
    """Follows stages and links, and says when other windows are due.

    Args:
        names: The regions in order, for the log.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._stages: list[deque[StageCosts]] = [deque(maxlen=_STAGE_STEPS) for _ in names]
        self._ways = [(_Way(), _Way()) for _ in names[1:]]
        self._num_steps = 0
        self._planned: _Seen | None = None
        """What the plan in force rests on."""
        self._moved_steps = 0
        self._changed_step: int | None = None
        self._most_microbatches = 1

    def on_step(
        self,
        step: int,
        figures: Sequence[Figures],
        *,
        windows: tuple[int, ...],
        num_microbatches: int,
    ) -> Change | None:
        """Take in one step.

        Args:
            step: Its number, as in the figures.
            figures: One of each region, in order.
            windows: Those that the step ran under.

        Returns:
            What the next step is to run under, or None where all stays as it is.
        """
        self._take_in(step, figures)
        self._most_microbatches = max(self._most_microbatches, num_microbatches)
        seen = self._seen()
        # A short last batch is no reason to plan for fewer microbatches.
        is_whole = num_microbatches == self._most_microbatches
        if seen is None or not is_whole or not self._is_due(step, seen):
            return None
        limits = Limits(
            num_microbatches=num_microbatches,
            in_flight=[each.in_flight_limit for each in figures],
        )
        plan, bound = choose_plan(seen.stages, seen.links, limits)
        before, self._planned, self._moved_steps = self._planned, seen, 0
        model = pipeline_model(seen.stages, seen.links)
        now_s = Trial(model, num_microbatches).step_s(windows)
        gains = plan.predicted_s < now_s * (1 - GAIN)
        narrower = sum(plan.windows) < NARROWER * sum(windows)
        if plan.windows == windows or not (gains or narrower):
            return None
        self._changed_step = step
        text = (
            f"step {step}: window {_listed(windows)} -> {_listed(plan.windows)}: "
            f"{_what_moved(before, seen, self._names)}, predicted step "
            f"{now_s:.3g} -> {plan.predicted_s:.3g} s (set by {bound})"
        )
        return Change(plan=plan, bound=bound, text=text)

    # ---- what is known

    def _take_in(self, step: int, figures: Sequence[Figures]) -> None:
        self._num_steps += 1
        for recent, own in zip(self._stages, figures, strict=True):
            if not own.forward_us:
                continue
            forward_s, backward_s = _seconds(own.forward_us), _seconds(own.backward_us)
            if self._num_steps == 1:
                forward_s, backward_s = _warm(forward_s), _warm(backward_s)
            elif self._num_steps == 2:
                recent.clear()
            # A region that trains nothing may have no backwards.
            recent.append(StageCosts(forward_s=forward_s, backward_s=backward_s or (0.0,)))
        for index, (down, up) in enumerate(self._ways):
            upper, lower = figures[index], figures[index + 1]
            down.take_in(step, upper.sent_down, lower.held_from_up, upper.slots_down)
            up.take_in(step, lower.sent_up, upper.held_from_down, lower.slots_up)

    def _seen(self) -> _Seen | None:
        """None until every stage and every link has shown itself."""
        links = [_link_costs(down, up) for down, up in self._ways]
        if not all(self._stages) or None in links:
            return None
        return _Seen(
            stages=tuple(_joined(recent) for recent in self._stages),
            links=tuple(link for link in links if link is not None),
        )

    # ---- whether it matters

    def _is_due(self, step: int, seen: _Seen) -> bool:
        if self._planned is None or self._num_steps <= _SETTLING_STEPS:
            return True
        moved = _has_moved(self._planned, seen)
        self._moved_steps = self._moved_steps + 1 if moved else 0
        cooled = self._changed_step is None or step - self._changed_step >= COOL_DOWN_STEPS
        return self._moved_steps >= CONFIRM_STEPS and cooled


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

    def take_in(
        self, step: int, passages: Sequence[Passage], holds: Sequence[Hold], slots: int
    ) -> None:
        trips = self._matches.add(passages, holds, step=step)
        if trips and not self._recent:
            records = [trip for trip in trips if trip.microbatch == RECORD]
            trips = [*records, *_warm([trip for trip in trips if trip.microbatch != RECORD])]
        if trips:
            self._recent.append(trips)
        self._slots = slots or None

    @property
    def trips(self) -> list[Trip]:
        last = list(self._recent[-1]) if self._recent else []
        return [*self._recent[0], *last] if len(self._recent) > 1 and len(last) < _FEW else last

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


def _joined(recent: Sequence[StageCosts]) -> StageCosts:
    return StageCosts(
        forward_s=tuple(s for each in recent for s in each.forward_s),
        backward_s=tuple(s for each in recent for s in each.backward_s),
    )


def _figures(seen: _Seen, names: Sequence[str]) -> dict[str, float]:
    """Every figure in seconds, under the name that the log has for it."""
    found = {}
    for index, link in enumerate(seen.links):
        found[f"delivery to {names[index + 1]}"] = link.forward.delivery_s
        found[f"delivery to {names[index]} from {names[index + 1]}"] = link.backward.delivery_s
    for name, stage in zip(names, seen.stages, strict=True):
        found[f"a microbatch in {name}"] = stage.both_s
    return found


def _has_moved(before: _Seen, seen: _Seen) -> bool:
    for old, new in zip(before.stages, seen.stages, strict=True):
        if abs(new.both_s - old.both_s) > MOVED_SHARE * old.both_s:
            return True
    least_s = MOVED_MICROBATCHES * seen.slowest_s
    for old_link, new_link in zip(before.links, seen.links, strict=True):
        old_s = old_link.forward.delivery_s + old_link.backward.delivery_s
        new_s = new_link.forward.delivery_s + new_link.backward.delivery_s
        if abs(new_s - old_s) > max(MOVED_SHARE * old_s, least_s):
            return True
    return False


def _what_moved(before: _Seen | None, seen: _Seen, names: Sequence[str]) -> str:
    """The figure that changed most, with its values before and now."""
    now = _figures(seen, names)
    if before is None:
        what = max((name for name in now if name.startswith("delivery")), key=now.__getitem__)
        return f"{what} {now[what] * 1e3:.0f} ms"
    then = _figures(before, names)
    what = max(now, key=lambda name: abs(now[name] - then[name]))
    return f"{what} {then[what] * 1e3:.0f} -> {now[what] * 1e3:.0f} ms"


def _listed(windows: Sequence[int]) -> str:
    return ",".join(map(str, windows))
