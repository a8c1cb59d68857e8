"""A run that never took place: steps of any length, with what goes wrong in them made up.

Microbatches have lengths that differ 8-fold, from step to step and within a step; a stage's time is
overhead + slope x tokens and a part that is quadratic, as attention is, with noise on top; tensors
are as large as their microbatch is long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from geotrain.control.attribution import CAUSES
from geotrain.control.joints import Joints
from geotrain.control.timings import Ran, Timings
from geotrain.control.verdicts import Verdict, Verdicts

NAMES = ("virginia", "frankfurt", "tokyo")
BYTES_A_TOKEN = 2048


@dataclass(kw_only=True)
class World:
    """What is changed in the middle of a run, by tests that do."""

    slow: dict[int, float] = field(default_factory=dict)
    """Stage -> factor on its compute."""
    coding_s: dict[int, float] = field(default_factory=dict)
    """Stage -> copying and coding of each microbatch."""
    more_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Link -> seconds of delay on top."""
    slow_link: dict[tuple[int, int], float] = field(default_factory=dict)
    """Link -> factor on a tensor's time at its rate."""
    loader_s: float = 0.0
    user_s: float = 0.0
    stopped: dict[int, float] = field(default_factory=dict)
    """Stage -> seconds within one action."""
    frozen_s: dict[int, float] = field(default_factory=dict)
    """Stage -> seconds within one wait."""


class Run:
    """One made-up run.

    Args:
        spread: By which factor lengths differ; 1 for none.
        quadratic: The share of a mean microbatch's time that grows with the square of its length.
        noise: Of each action, relative; of each delivery in the same share of the delay.
    """

    def __init__(
        self,
        seed: int,
        *,
        stages: int = 2,
        microbatches: int = 16,
        spread: float = 8.0,
        quadratic: float = 0.15,
        noise: float = 0.05,
        one_way_s: float = 0.05,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.names = NAMES[:stages]
        self.world = World()
        self.step = 0
        self.lines: list[str] = []
        self._rng = Random(seed)
        self.count = microbatches
        self.scale = 1
        """Of all microbatches' lengths."""
        self._spread, self._quadratic, self._noise = spread, quadratic, noise
        self._one_way_s = one_way_s
        self._clock_s = [self._rng.uniform(0, 1e6) for _ in range(stages)]
        self._joints = Joints(stages)
        self._verdicts = Verdicts(self.names, layers=layers or [4] * stages)
        self._at_s = 0.0

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return self._verdicts.now

    def kinds(self) -> set[tuple[str, str]]:
        return {(each.kind, each.where) for each in self._verdicts.now}

    def go(self, steps: int, *, until: Callable[["Run"], bool] = lambda run: False) -> int:
        """Run so many steps, or until it holds. Returns how many."""
        for number in range(1, steps + 1):
            self._one()
            if until(self):
                return number
        return steps

    def _one(self) -> None:
        self.step += 1
        rng, world = self._rng, self.world
        # A step's lengths: short ones, long ones or any, as batches sorted by length have them.
        low, high = sorted((rng.uniform(1, self._spread), rng.uniform(1, self._spread)))
        tokens = [int(256 * self.scale * rng.uniform(low, high)) for _ in range(self.count)]
        stages = range(len(self.names))
        forward = [[self._compute_s(stage, each, 0.020) for each in tokens] for stage in stages]
        backward = [[self._compute_s(stage, each, 0.040) for each in tokens] for stage in stages]
        for stage, seconds in world.stopped.items():
            backward[stage][self.count // 2] += seconds
        runs = [_in_turn(forward[s], backward[s]) for s in stages]
        step_s = max(each[1][-1][1] for each in runs) + 0.2
        timings = self._timings(tokens, runs)
        joints = self._joints.take_in(timings)
        spent = dict.fromkeys(CAUSES, 0.0) | {
            "compute": step_s,
            "loader": world.loader_s,
            "user_code": world.user_s,
        }
        spent_s = {name: {str(c): s for c, s in spent.items()} for name in self.names}
        self.lines += self._verdicts.on_step(self.step, timings, joints, spent_s)
        self._at_s += step_s

    def _compute_s(self, stage: int, tokens: int, mean_s: float) -> float:
        size = tokens / (256 * (1 + self._spread) / 2)
        linear = 1 - self._quadratic - 0.1
        time_s = mean_s * (0.1 + linear * size + self._quadratic * size**2)
        time_s *= self.world.slow.get(stage, 1.0)
        return time_s * self._rng.lognormvariate(0.0, self._noise) + (
            self.world.coding_s.get(stage, 0.0)
        )

    def _timings(self, tokens: Sequence[int], runs: Sequence[tuple]) -> list[Timings]:
        told = []
        for stage, (forward, backward) in enumerate(runs):
            came_f = came_b = None
            if stage > 0:
                came_f = self._came(
                    stage - 1, stage, tokens, [end for _, end in runs[stage - 1][0]]
                )
            if stage < len(runs) - 1:
                came_b = self._came(
                    stage + 1, stage, tokens, [end for _, end in runs[stage + 1][1]]
                )
            word_s = sum(self._way_s(s, s + 1, 0) for s in range(stage))
            told.append(
                Timings(
                    origin_us=_us(self._clock_s[stage] + self._at_s),
                    heard_us=_us(word_s),
                    opened_us=_us(word_s),
                    stalled_us=_us(self.world.frozen_s.get(stage, 0.0)),
                    coding_us=_us(2 * len(tokens) * self.world.coding_s.get(stage, 0.0)),
                    forward=_ran(forward, came_f, [each * BYTES_A_TOKEN for each in tokens]),
                    backward=_ran(backward, came_b, [0] * len(tokens)),
                )
            )
        return told

    def _came(
        self, sender: int, receiver: int, tokens: Sequence[int], sent_s: Sequence[float]
    ) -> list[float]:
        """When each tensor came: they queue for the link, and keep their order."""
        came, free_s, last_s = [], 0.0, 0.0
        for each, at_s in zip(tokens, sent_s, strict=True):
            transfer_s = each * BYTES_A_TOKEN / 125e6
            transfer_s *= self.world.slow_link.get((sender, receiver), 1.0)
            free_s = max(free_s, at_s) + transfer_s
            last_s = max(last_s, free_s + self._way_s(sender, receiver, each))
            came.append(last_s)
        return came

    def _way_s(self, sender: int, receiver: int, tokens: int) -> float:
        late_s = abs(self._rng.gauss(0.0, self._noise)) * self._one_way_s
        return self._one_way_s + late_s + self.world.more_s.get((sender, receiver), 0.0)


def _in_turn(forward: Sequence[float], backward: Sequence[float]) -> tuple[list, list]:
    """(begin, end) of every forward and backward: one of each in turn."""
    now, forwards, backwards = 0.0, [], []
    for ahead, back in zip(forward, backward, strict=True):
        forwards.append((now, now + ahead))
        backwards.append((now + ahead, now + ahead + back))
        now += ahead + back
    return forwards, backwards


def _ran(runs: Sequence[tuple], came: Sequence[float] | None, sizes: Sequence[int]):
    return tuple(
        Ran(
            microbatch,
            _us(begin),
            _us(end) - _us(begin),
            _us(came[microbatch] if came is not None else begin),
            sizes[microbatch],
        )
        for microbatch, (begin, end) in enumerate(runs)
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
