"""When the plan changes, and why: runs in the first region, at the end of each step.

What the regions measured goes in, one step after the other; out come new windows, seldom. A
change needs figures that moved by more than their own noise, in several steps running, and a gain:
in two where they moved far, in five where it may still be chance. Only a link that became far
slower is followed at once: each step then waits for it, while windows that are wider than they need
to be cost no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from geotrain.control.costs import LinkCosts, StageCosts, pipeline_model
from geotrain.control.counts import Sizes, choose_count
from geotrain.control.figures import Figures
from geotrain.control.observed import Observed, Seen
from geotrain.control.planner import Bound, Limits, Plan, Trial, choose_plan

CONFIRM_STEPS = 5
"""Steps running in which a figure must have moved the same way. The latest of 16 tensors tells the
delivery's time, so that one step in ten differs by as much as counts for a move."""
CONFIRM_FAR_STEPS = 2
"""The same where it moved far: one slow step is no change."""
COOL_DOWN_STEPS = 3
"""Between two changes, so that the second sees what the first did."""
MOVED_SHARE = 0.2
"""Of a delivery's time, or of a stage's: less is noise."""
MOVED_MICROBATCHES = 0.34
"""Of the slowest stage's time for one; a delivery that moved by less hardly moves a window."""
FAR_SHARE = 0.5
"""Of the lesser of what was planned on and what is seen, and a microbatch at least: a far move. A
link whose quickest tensors are so much slower is followed at once: no bad luck delays all."""
REVISIT_STEPS = 10
"""Where counts may change: after so many steps without a look, one is taken; what another count
would save shows better once several steps have been averaged."""
BACK_STEPS = 10
"""Between two changes of the count in opposite directions: a count is given a chance."""
GAIN = 0.02
"""What new windows must save of a step, unless they are much narrower."""
NARROWER = 0.75
"""Windows whose sum is below this share of the old ones' free memory that is worth a change."""
_SETTLING_STEPS = 2
"""From the start: the first plan rests on half a step in which everything warmed up."""


_Costs = TypeVar("_Costs", StageCosts, LinkCosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A new plan and the line that the log has for it."""

    plan: Plan
    bound: Bound
    text: str


class Controller:
    """Follows stages and links, and says when another plan is due.

    Args:
        names: The regions in order, for the log.
        counts: Whether it may change the number of microbatches as well as the windows.
    """

    def __init__(self, names: Sequence[str], *, counts: bool = False) -> None:
        self._names = names
        self._counts = counts
        self._observed = Observed(len(names))
        self._sizes = Sizes()
        self._planned: Seen | None = None
        """What the plan in force rests on."""
        self._newest: Seen | None = None
        self._moved = _Lasting(CONFIRM_STEPS)
        self._moved_far = _Lasting(CONFIRM_FAR_STEPS)
        self._changed_step: int | None = None
        self._looked_step = 0
        self._counted_step = -BACK_STEPS
        """In which the count changed last."""
        self._has_doubled = False
        self._most_samples = 1

    def on_step(
        self,
        step: int,
        figures: Sequence[Figures],
        *,
        windows: tuple[int, ...],
        num_microbatches: int,
        num_samples: int,
    ) -> Change | None:
        """Take in one step.

        Args:
            step: Its number, as in the figures.
            figures: One of each region, in order.
            windows, num_microbatches, num_samples: Those that the step ran with.

        Returns:
            What the next step is to run under, or None where all stays as it is.
        """
        self._most_samples = max(self._most_samples, num_samples)
        if num_samples < self._most_samples / 2 or num_microbatches == 0:
            return None  # a short last batch says little of the others
        self._observed.take_in(step, figures)
        newest, previous = self._observed.seen(), self._newest
        self._newest = newest
        if newest is None:
            return None
        if self._counts:
            self._sizes.add(num_samples / num_microbatches, newest.stages)
        is_far = self._planned is not None and _is_far_slower(self._planned, newest)
        is_due = self._is_due(step, newest) or is_far
        if not is_due and not self._is_revisited(step):
            return None
        self._looked_step = step
        seen = newest if is_far else _confirmed(self._planned, previous, newest)
        plan, bound = self._choose(step, seen, figures, num_microbatches, num_samples)
        if bound == "rate" and self._observed.num_steps < _SETTLING_STEPS:
            # A connection that still finds its rate looks just like a slow link; with narrow
            # windows it would never find it.
            return None
        if not is_due and plan.num_microbatches == num_microbatches:
            return None
        before, self._planned = self._planned, seen
        self._moved, self._moved_far = _Lasting(CONFIRM_STEPS), _Lasting(CONFIRM_FAR_STEPS)
        model = pipeline_model(seen.stages, seen.links)
        now_s = Trial(model, num_microbatches).step_s(_held_to(windows, figures))
        changes = _listed_changes(windows, num_microbatches, plan)
        gains = plan.predicted_s < now_s * (1 - GAIN)
        narrower = sum(plan.windows) < NARROWER * sum(windows)
        if not changes or not (gains or narrower):
            return None
        self._changed_step = step
        if plan.num_microbatches != num_microbatches:
            self._counted_step = step
            self._has_doubled = plan.num_microbatches > num_microbatches
            self._observed.restart(step + 1)
            self._planned = self._newest = None
        text = (
            f"step {step}: {changes}: {_what_moved(before, seen, self._names)}, predicted step "
            f"{now_s:.3g} -> {plan.predicted_s:.3g} s (set by {bound})"
        )
        return Change(plan=plan, bound=bound, text=text)

    def _choose(
        self,
        step: int,
        seen: Seen,
        figures: Sequence[Figures],
        num_microbatches: int,
        num_samples: int,
    ) -> tuple[Plan, Bound]:
        if not self._counts:
            limits = Limits(num_microbatches=num_microbatches, in_flight=_most(figures))
            return choose_plan(seen.stages, seen.links, limits)
        return choose_count(
            seen,
            self._sizes,
            num_samples=num_samples,
            num_microbatches=num_microbatches,
            in_flight=[each.in_flight_limit for each in figures],
            memory=[each.memory_limit for each in figures],
            may_double=self._has_doubled or step - self._counted_step >= BACK_STEPS,
            may_halve=not self._has_doubled or step - self._counted_step >= BACK_STEPS,
        )

    def _is_revisited(self, step: int) -> bool:
        return self._counts and step - self._looked_step >= REVISIT_STEPS

    def _is_due(self, step: int, newest: Seen) -> bool:
        since = step - self._changed_step if self._changed_step is not None else COOL_DOWN_STEPS
        if self._planned is None and self._changed_step is not None:
            return since >= CONFIRM_FAR_STEPS  # another count was tried; it has to warm up, too
        if self._planned is None or self._observed.num_steps <= _SETTLING_STEPS:
            return True
        moved = self._moved.is_confirmed(_moves(self._planned, newest))
        moved_far = self._moved_far.is_confirmed(_moves(self._planned, newest, is_far=True))
        return (moved or moved_far) and since >= COOL_DOWN_STEPS


class _Lasting:
    """What has moved, and which way, in several steps running."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._moves: frozenset[str] = frozenset()
        self._running = 0

    def is_confirmed(self, moves: frozenset[str]) -> bool:
        """Take in the moves of one step; whether one of them has lasted long enough."""
        lasting = moves & self._moves
        self._running = self._running + 1 if lasting else min(1, len(moves))
        self._moves = lasting or moves
        return self._running >= self._steps


def _most(figures: Sequence[Figures]) -> list[int]:
    """The most that each region may hold in flight; 0: no limit."""
    pairs = [(each.in_flight_limit, each.memory_limit) for each in figures]
    return [min([limit for limit in pair if limit], default=0) for pair in pairs]


def _held_to(windows: Sequence[int], figures: Sequence[Figures]) -> tuple[int, ...]:
    """The windows as the regions keep them, which is within their own limits."""
    pairs = zip(windows, _most(figures), strict=True)
    return tuple(min(window, most) if most else window for window, most in pairs)


def _confirmed(planned: Seen | None, previous: Seen | None, newest: Seen) -> Seen:
    """What the last two steps agree on: of each figure the one that moved less.

    A step in which a link changed, or in which one tensor in ten had bad luck, says too much.
    """
    if planned is None or previous is None:
        return newest

    def nearer(old_s: float, a: _Costs, b: _Costs) -> _Costs:
        return a if abs(a.both_s - old_s) < abs(b.both_s - old_s) else b

    stages = zip(planned.stages, previous.stages, newest.stages, strict=True)
    links = zip(planned.links, previous.links, newest.links, strict=True)
    return Seen(
        stages=tuple(nearer(old.both_s, a, b) for old, a, b in stages),
        links=tuple(nearer(old.both_s, a, b) for old, a, b in links),
    )


def _is_far_slower(before: Seen, now: Seen) -> bool:
    """Whether some link takes far longer for all that it carries, in a single step."""
    return any(
        new.least_s - old.least_s > max(FAR_SHARE * old.least_s, now.slowest_s)
        for old, new in zip(before.links, now.links, strict=True)
    )


def _moves(before: Seen, now: Seen, *, is_far: bool = False) -> frozenset[str]:
    """The figures that differ by more than their noise, each with the direction it went."""
    share = FAR_SHARE if is_far else MOVED_SHARE
    least_s = (1.0 if is_far else MOVED_MICROBATCHES) * now.slowest_s
    stages = zip(before.stages, now.stages, strict=True)
    links = zip(before.links, now.links, strict=True)
    pairs = [(f"stage {i}", old.both_s, new.both_s, 0.0) for i, (old, new) in enumerate(stages)]
    pairs += [(f"link {i}", old.both_s, new.both_s, least_s) for i, (old, new) in enumerate(links)]
    return frozenset(
        f"{name} {'up' if new_s > old_s else 'down'}"
        for name, old_s, new_s, most_s in pairs
        if abs(new_s - old_s) > max(share * min(old_s, new_s), most_s)
    )


def _what_moved(before: Seen | None, seen: Seen, names: Sequence[str]) -> str:
    """The figure that changed most, with its values before and now."""
    now = seen.figures(names)
    if before is None:
        what = max((name for name in now if name.startswith("delivery")), key=now.__getitem__)
        return f"{what} {now[what] * 1e3:.0f} ms"
    then = before.figures(names)
    what = max(now, key=lambda name: abs(now[name] - then[name]))
    return f"{what} {then[what] * 1e3:.0f} -> {now[what] * 1e3:.0f} ms"


def _listed_changes(windows: tuple[int, ...], num_microbatches: int, plan: Plan) -> str:
    changes = []
    if plan.num_microbatches != num_microbatches:
        changes.append(f"microbatches {num_microbatches} -> {plan.num_microbatches}")
    if plan.windows != windows:
        changes.append(f"window {_listed(windows)} -> {_listed(plan.windows)}")
    return ", ".join(changes)


def _listed(windows: Sequence[int]) -> str:
    return ",".join(map(str, windows))
