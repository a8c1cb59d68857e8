"""When the plan changes, and why: runs in the first region, at the end of each step.

What the regions measured goes in, one step after the other; out come new windows, seldom. A
change needs figures that moved for good (`trend`), and something that it gives: a shorter step, or
memory, which its line in the log then names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from geotrain.control.costs import pipeline_model
from geotrain.control.counts import Sizes, choose_count
from geotrain.control.figures import Figures
from geotrain.control.observed import Observed, Seen
from geotrain.control.planner import Bound, Limits, Plan, Trial, choose_plan
from geotrain.control.trend import CONFIRM_FAR_STEPS, Move, Trend

COOL_DOWN_STEPS = 3
"""Between two changes, so that the second sees what the first did."""
REVISIT_STEPS = 10
"""Where counts may change: after so many steps without a look, one is taken; what another count
would save shows better once several steps have been averaged."""
BACK_STEPS = 10
"""Between two changes of the count in opposite directions: a count is given a chance."""
GAIN = 0.02
"""What new windows must save of a step, unless they are much narrower."""
NARROWER = 0.75
"""Windows whose sum is below this share of the old ones' free memory that is worth a change."""
MUCH_NARROWER = 0.5
"""The same where nothing moved far: the latest tensors of ten steps may just have had good luck."""
_SETTLING_STEPS = 2
"""From the start: the first plan rests on half a step in which everything warmed up. Windows that
are wider than they need to be can wait until there is more to go by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A new plan and the line that the log has for it."""

    plan: Plan
    bound: Bound
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step that has run, and what it ran with."""

    number: int
    figures: Sequence[Figures]
    windows: tuple[int, ...]
    num_microbatches: int
    num_samples: int

    @property
    def most(self) -> list[int]:
        """The most that each region may hold in flight; 0: no limit."""
        pairs = [(each.in_flight_limit, each.memory_limit) for each in self.figures]
        return [min([limit for limit in pair if limit], default=0) for pair in pairs]

    @property
    def held(self) -> tuple[int, ...]:
        """The windows as the regions keep them, which is within their own limits."""
        pairs = zip(self.windows, self.most, strict=True)
        return tuple(min(window, most) if most else window for window, most in pairs)


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
        self._trend = Trend()
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
        newest = self._observed.seen()
        if newest is None:
            return None
        if self._counts:
            self._sizes.add(num_samples / num_microbatches, newest.stages)
        ran = _Step(
            number=step,
            figures=figures,
            windows=windows,
            num_microbatches=num_microbatches,
            num_samples=num_samples,
        )
        due = self._due(step, newest, self._trend.take_in(newest))
        if due is None and (ran.held != windows or self._is_revisited(step)):
            due = Move(seen=self._trend.pooled(), is_far=False, is_settled=True)
            return self._look(ran, due, counts_only=ran.held == windows)
        return self._look(ran, due) if due is not None else None

    def _look(self, ran: _Step, due: Move, *, counts_only: bool = False) -> Change | None:
        """The plan for what is seen, where it gives something.

        Args:
            counts_only: Windows alone are not to change.
        """
        self._looked_step = ran.number
        plan, bound = self._choose(ran, due.seen)
        model = pipeline_model(due.seen.stages, due.seen.links)
        now_s = Trial(model, ran.num_microbatches).step_s(ran.held)
        if bound == "rate" and self._observed.num_steps < _SETTLING_STEPS:
            # A connection that still finds its rate looks just like a slow link; with narrow
            # windows it would never find it.
            plan = replace(
                plan,
                num_microbatches=ran.num_microbatches,
                windows=ran.held,
                predicted_s=now_s,
            )
        if counts_only and plan.num_microbatches == ran.num_microbatches:
            return None
        changes, given = _listed_changes(ran, plan), _given(ran, now_s, plan, due)
        before, is_changed = self._trend.planned, bool(changes) and given is not None
        if is_changed or due.is_settled:
            self._trend.rest_on(due.seen, is_far=due.is_far)
        if not is_changed:
            return None
        self._changed_step = ran.number
        if plan.num_microbatches != ran.num_microbatches:
            self._counted_step = ran.number
            self._has_doubled = plan.num_microbatches > ran.num_microbatches
            self._observed.restart(ran.number + 1)
            self._trend = Trend()
        moved = _what_moved(before, due.seen, self._names)
        text = f"step {ran.number}: {changes}: {moved}, {given} (set by {bound})"
        return Change(plan=plan, bound=bound, text=text)

    def _choose(self, ran: _Step, seen: Seen) -> tuple[Plan, Bound]:
        if not self._counts:
            limits = Limits(num_microbatches=ran.num_microbatches, in_flight=ran.most)
            return choose_plan(seen.stages, seen.links, limits)
        is_long_ago = ran.number - self._counted_step >= BACK_STEPS
        return choose_count(
            seen,
            self._sizes,
            num_samples=ran.num_samples,
            num_microbatches=ran.num_microbatches,
            in_flight=[each.in_flight_limit for each in ran.figures],
            memory=[each.memory_limit for each in ran.figures],
            may_double=self._has_doubled or is_long_ago,
            may_halve=not self._has_doubled or is_long_ago,
        )

    def _is_revisited(self, step: int) -> bool:
        return self._counts and step - self._looked_step >= REVISIT_STEPS

    def _due(self, step: int, newest: Seen, move: Move | None) -> Move | None:
        """What to plan on, where windows are due for a look."""
        num_steps = self._observed.num_steps
        if num_steps <= _SETTLING_STEPS:
            return Move(seen=newest, is_far=True, is_settled=False)
        since = step - self._changed_step if self._changed_step is not None else COOL_DOWN_STEPS
        is_first = num_steps == _SETTLING_STEPS + 1 or self._trend.planned is None
        if is_first and since >= CONFIRM_FAR_STEPS:
            # The first plan, or another count was tried, which has to warm up, too.
            seen = self._trend.pooled(_SETTLING_STEPS)
            return Move(seen=seen, is_far=True, is_settled=self._trend.is_steady)
        return move if since >= COOL_DOWN_STEPS else None


def _given(ran: _Step, now_s: float, plan: Plan, due: Move) -> str | None:
    """What the plan gives, in words; None where that is not worth a change."""
    if plan.predicted_s < now_s * (1 - GAIN):
        return f"predicted step {now_s:.3g} -> {plan.predicted_s:.3g} s"
    before, now = sum(ran.held), sum(plan.windows)
    if ran.held != ran.windows:
        return f"memory for {_listed(ran.held)} in flight, predicted step {plan.predicted_s:.3g} s"
    if due.is_settled and now < before * (NARROWER if due.is_far else MUCH_NARROWER):
        return f"{before - now} fewer in flight, predicted step still {plan.predicted_s:.3g} s"
    return None


def _what_moved(before: Seen | None, seen: Seen, names: Sequence[str]) -> str:
    """The figure that changed most, with its values before and now."""
    now = seen.figures(names)
    if before is None:
        what = max((name for name in now if name.startswith("delivery")), key=now.__getitem__)
        return f"{what} {now[what] * 1e3:.0f} ms"
    then = before.figures(names)
    what = max(now, key=lambda name: abs(now[name] - then[name]))
    return f"{what} {then[what] * 1e3:.0f} -> {now[what] * 1e3:.0f} ms"


def _listed_changes(ran: _Step, plan: Plan) -> str:
    changes = []
    if plan.num_microbatches != ran.num_microbatches:
        changes.append(f"microbatches {ran.num_microbatches} -> {plan.num_microbatches}")
    if plan.windows != ran.windows:
        changes.append(f"window {_listed(ran.windows)} -> {_listed(plan.windows)}")
    return ", ".join(changes)


def _listed(windows: Sequence[int]) -> str:
    return ",".join(map(str, windows))
