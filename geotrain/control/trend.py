"""When the figures that a plan rests on have moved for good, and what they are then.

One step may be slow for a reason that is gone in the next: a burst of losses, a connection that
probes its path, another program. So nothing that a single step shows is a move. A far one counts
after two steps running that agree on it, by what most of their tensors took; a smaller one, or one
of the latest tensors alone, after five, by all of their tensors together.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from geotrain.control.costs import DirectionCosts, LinkCosts, StageCosts, quantile
from geotrain.control.observed import Seen

CONFIRM_STEPS = 5
"""Steps running in which a figure must have moved the same way. The latest of 16 tensors tells the
delivery's time, so that one step in ten differs by as much as counts for a move."""
CONFIRM_FAR_STEPS = 2
"""The same where it moved far: one slow step is no change."""
MOVED_SHARE = 0.2
"""Of a delivery's time, or of a stage's: less is noise."""
MOVED_MICROBATCHES = 0.34
"""Of the slowest stage's time for one; a delivery that moved by less hardly moves a window."""
FAR_SHARE = 0.5
"""Of the lesser of what was planned on and what is seen, and a microbatch at least: a far move."""
MOVED_RATE = 0.34
"""Of the slowest stage's time for one microbatch, that a tensor keeps a link busy for: a rate that
moved by less hardly moves a window."""
KEPT_STEPS = 10
"""Whose tensors count together: the latest one in twenty is then known from enough of them."""

_Costs = TypeVar("_Costs", StageCosts, LinkCosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move that is confirmed."""

    seen: Seen
    """What to plan on from now on."""
    is_far: bool
    is_settled: bool
    """Whether the newest step agrees: a link that changed in the middle of one says too little."""


class Trend:
    """Compares every step with what the plan in force rests on."""

    def __init__(self) -> None:
        self.planned: Seen | None = None
        self._recent: deque[Seen] = deque(maxlen=KEPT_STEPS)
        """Since the last far move."""
        self._moved = _Lasting(CONFIRM_STEPS)
        self._moved_far = _Lasting(CONFIRM_FAR_STEPS)

    def take_in(self, newest: Seen) -> Move | None:
        """One step's figures. Returns the move that they confirm, until `rest_on` is called."""
        self._recent.append(newest)
        if self.planned is None:
            return None
        moved = self._moved.is_confirmed(_moves(self.planned, newest))
        moved_far = self._moved_far.is_confirmed(_far_moves(self.planned, newest))
        if moved_far:
            seen = _nearer(self.planned, *list(self._recent)[-2:])
            return Move(seen=seen, is_far=True, is_settled=_agree(seen, newest))
        if moved:
            seen = self.pooled()
            # The same way: one burst among them is no reason to widen what could be narrower.
            if _moves(self.planned, seen) & self._moved.moves:
                return Move(seen=seen, is_far=False, is_settled=True)
        return None

    @property
    def is_steady(self) -> bool:
        """Whether the last two steps agree: else a connection may still be finding its rate."""
        last = list(self._recent)[-2:]
        return len(last) == 2 and _agree(*last)

    def rest_on(self, seen: Seen, *, is_far: bool = False) -> None:
        """Compare with these from now on.

        Args:
            is_far: What was seen before the newest step says nothing any more.
        """
        self.planned = seen
        self._moved, self._moved_far = _Lasting(CONFIRM_STEPS), _Lasting(CONFIRM_FAR_STEPS)
        if is_far:
            while len(self._recent) > 1:
                self._recent.popleft()

    def pooled(self, most_steps: int = KEPT_STEPS) -> Seen:
        """The tensors and microbatches of the last steps together, the newest first."""
        steps = list(self._recent)[-most_steps:][::-1]
        assert steps
        return Seen(
            stages=tuple(
                StageCosts(
                    forward_s=tuple(s for each in same for s in each.forward_s),
                    backward_s=tuple(s for each in same for s in each.backward_s),
                )
                for same in zip(*(each.stages for each in steps), strict=True)
            ),
            links=tuple(
                LinkCosts(
                    forward=_pooled([each.forward for each in same]),
                    backward=_pooled([each.backward for each in same]),
                )
                for same in zip(*(each.links for each in steps), strict=True)
            ),
        )


def _pooled(ways: Sequence[DirectionCosts]) -> DirectionCosts:
    """One direction as several steps saw it: where their bases differ, so does their lateness."""
    latency_s = quantile([way.latency_s for way in ways], 0.5)
    transfer_s = quantile([way.transfer_s for way in ways], 0.5)
    jitter_s = tuple(
        max(0.0, each + way.latency_s + way.transfer_s - latency_s - transfer_s)
        for way in ways
        for each in way.jitter_s
    )
    return replace(ways[0], latency_s=latency_s, transfer_s=transfer_s, jitter_s=jitter_s)


class _Lasting:
    """What has moved, and which way, in several steps running."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.moves: frozenset[str] = frozenset()
        self._running = 0

    def is_confirmed(self, moves: frozenset[str]) -> bool:
        """Take in the moves of one step; whether one of them has lasted long enough."""
        lasting = moves & self.moves
        self._running = self._running + 1 if lasting else min(1, len(moves))
        self.moves = lasting or moves
        return self._running >= self._steps


def _nearer(planned: Seen, previous: Seen, newest: Seen) -> Seen:
    """What two steps agree on: of each figure the one that moved less.

    A step in which a link changed, or in which one tensor in ten had bad luck, says too much.
    """

    def nearer(old_s: float, a: _Costs, b: _Costs) -> _Costs:
        return a if abs(a.both_s - old_s) < abs(b.both_s - old_s) else b

    stages = zip(planned.stages, previous.stages, newest.stages, strict=True)
    links = zip(planned.links, previous.links, newest.links, strict=True)
    return Seen(
        stages=tuple(nearer(old.both_s, a, b) for old, a, b in stages),
        links=tuple(nearer(old.both_s, a, b) for old, a, b in links),
    )


def _moves(before: Seen, now: Seen) -> frozenset[str]:
    """The figures that differ by more than their noise, each with the direction it went."""
    return _apart(
        _links(before, now),
        _stages(before, now),
        share=MOVED_SHARE,
        least_s=MOVED_MICROBATCHES * now.slowest_s,
    )


def _far_moves(before: Seen, now: Seen) -> frozenset[str]:
    """The same of those that differ by far, for most tensors, and of the links' rates.

    A rate that its delivery hardly shows, beside a long latency, still decides whether windows hide
    the latency or keep queues short.
    """
    return _apart(
        [(link.middle_s, new.middle_s) for link, new in zip(before.links, now.links, strict=True)],
        _stages(before, now),
        share=FAR_SHARE,
        least_s=now.slowest_s,
    ) | frozenset(f"rate of {each}" for each in _rates_apart(before, now))


def _rates_apart(before: Seen, now: Seen) -> frozenset[str]:
    return _apart(
        [(link.busy_s, new.busy_s) for link, new in zip(before.links, now.links, strict=True)],
        [],
        share=FAR_SHARE,
        least_s=MOVED_RATE * now.slowest_s,
    )


def _agree(one: Seen, other: Seen) -> bool:
    """Whether windows for the one are about right for the other."""
    are_far = _apart(_links(one, other), [], share=FAR_SHARE, least_s=other.slowest_s)
    return not (are_far or _rates_apart(one, other))


def _links(before: Seen, now: Seen) -> list[tuple[float, float]]:
    return [(link.both_s, new.both_s) for link, new in zip(before.links, now.links, strict=True)]


def _stages(before: Seen, now: Seen) -> list[tuple[float, float]]:
    return [(each.both_s, new.both_s) for each, new in zip(before.stages, now.stages, strict=True)]


def _apart(
    links: Sequence[tuple[float, float]],
    stages: Sequence[tuple[float, float]],
    *,
    share: float,
    least_s: float,
) -> frozenset[str]:
    """Of (before, now) those that differ by a share of the lesser, and links by least_s."""
    pairs = [(f"stage {i}", *each, 0.0) for i, each in enumerate(stages)]
    pairs += [(f"link {i}", *each, least_s) for i, each in enumerate(links)]
    return frozenset(
        f"{name} {'up' if new_s > old_s else 'down'}"
        for name, old_s, new_s, most_s in pairs
        if abs(new_s - old_s) > max(share * min(old_s, new_s), most_s)
    )
