"""Where each step's time went, and what is off: every region finds it from the same votes."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from geotrain.control.attribution import CAUSES, Spans, Spent, attribute
from geotrain.control.joints import Joints
from geotrain.control.laid_out import lay_out
from geotrain.control.timings import Ran, Timings
from geotrain.control.verdicts import Verdict, Verdicts
from geotrain.control.votes import Vote
from geotrain.pipeline.context import Context
from geotrain.pipeline.line import Line
from geotrain.pipeline.runtime import Account
from geotrain.pipeline.schedule import Kind

logger = logging.getLogger(__name__)


class StepClock:
    """One step's parts, as they pass; times in monotonic seconds.

    Args:
        origin_s: When the previous step ended.
        loader_s: What of the time since then the loader took.
        own_s: What of it explaining that step took.
    """

    def __init__(self, origin_s: float, loader_s: float, own_s: float) -> None:
        self.origin_s, self.loader_s = origin_s, loader_s
        self._own_s = own_s
        self._last_s = time.monotonic()
        self._parts_s = {"user": self._last_s - origin_s - loader_s - own_s}

    def mark(self, part: str) -> None:
        """What has run since the last mark, or since the step began, was this part."""
        now = time.monotonic()
        self._parts_s[part] = now - self._last_s
        self._last_s = now

    @property
    def ended_s(self) -> float:
        """The last mark."""
        return self._last_s

    def part_s(self, part: str) -> float:
        return self._parts_s[part]

    def spans(self, account: Account) -> Spans:
        """All parts, once they have been marked."""
        parts_s = self._parts_s
        return Spans(
            user_s=parts_s["user"],
            loader_s=self.loader_s,
            open_s=parts_s["open"],
            run_s=parts_s["run"],
            norms_s=parts_s["norms"],
            exchange_s=parts_s["exchange"],
            decide_s=parts_s["decide"] + self._own_s,
            commit_s=parts_s["commit"],
            compute_s=account.compute_s,
            coding_s=account.transfer_s,
            arena_s=account.arena_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known once a step is over."""

    step_s: float
    attribution_s: Mapping[str, float]
    """Of this region's step."""
    regions_s: Mapping[str, Mapping[str, float]]
    """Of every region's previous step."""
    verdicts: tuple[Verdict, ...]


class Explaining:
    """This region's part in it."""

    def __init__(self, context: Context, line: Line) -> None:
        place = context.place
        self._context = context
        self._line = line
        self._joints = Joints(len(place.region_names))
        self._verdicts = Verdicts(place.region_names, layers=place.num_layers)
        self._ended_s = time.monotonic()
        self._loader_s = 0.0
        self._own_s = 0.0
        self._optimizer_s = 0.0
        self._spent: Mapping[Spent, float] | None = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around the wait for the next batch."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._loader_s += time.monotonic() - began

    def start(self) -> StepClock:
        """The next step begins."""
        clock = StepClock(self._ended_s, self._loader_s, self._own_s)
        self._loader_s = 0.0
        return clock

    def timings(self, account: Account, clock: StepClock) -> Timings:
        """What this region's vote says of the step just run."""
        heard_s, told_s = self._line.opened_s
        return Timings(
            origin_us=_us(clock.origin_s),
            heard_us=_us(heard_s - clock.origin_s),
            opened_us=_us(told_s - clock.origin_s),
            loader_us=_us(clock.loader_s),
            user_us=_us(clock.part_s("user")),
            optimizer_us=_us(self._optimizer_s),
            coding_us=_us(account.transfer_s),
            stalled_us=_us(self._context.take_stalled_s()),
            forward=_runs(account, "F", clock.origin_s),
            backward=_runs(account, "B", clock.origin_s),
        )

    @property
    def spent_us(self) -> tuple[int, ...]:
        """What this region's vote says of its previous step."""
        return tuple(_us(self._spent[cause]) for cause in CAUSES) if self._spent else ()

    def finish(
        self, step: int, votes: Sequence[Vote], account: Account, clock: StepClock
    ) -> Explanation:
        """Explain the step that is over, and log what is off since then, or not any more."""
        spans = clock.spans(account)
        self._ended_s = clock.ended_s
        self._optimizer_s = spans.norms_s + spans.commit_s
        place = self._context.place
        ordered = sorted(votes, key=lambda vote: vote.region)
        timings = [vote.timings or Timings() for vote in ordered]
        joints = self._joints.take_in(timings)
        self._spent = attribute(lay_out(timings, joints), timings, spans, own=place.index)
        regions_s = {
            name: {str(cause): us / 1e6 for cause, us in zip(CAUSES, vote.spent_us, strict=True)}
            for name, vote in zip(place.region_names, ordered, strict=True)
            if len(vote.spent_us) == len(CAUSES)
        }
        for text in self._verdicts.on_step(step, timings, joints, regions_s):
            logger.warning("%s", text)
        self._own_s = time.monotonic() - clock.ended_s
        return Explanation(
            step_s=spans.step_s,
            attribution_s={str(cause): spent_s for cause, spent_s in self._spent.items()},
            regions_s=regions_s,
            verdicts=self._verdicts.now,
        )


def _runs(account: Account, kind: Kind, origin_s: float) -> tuple[Ran, ...]:
    return tuple(
        Ran(
            ran.microbatch,
            _us(ran.begin_s - origin_s),
            _us(ran.end_s - ran.begin_s),
            _us((ran.came_s if ran.came_s is not None else ran.begin_s) - origin_s),
            ran.input_bytes,
        )
        for ran in account.trace
        if ran.kind == kind
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
