"""Where a region's step went: every second of it under one name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from geotrain.control.laid_out import LaidOut
from geotrain.control.timings import Timings
from geotrain.pipeline.idle import Cause, idle_of_s

Spent = Literal[
    "compute",
    "coding",
    "fill",
    "drain",
    "link_delay",
    "link_rate",
    "arena",
    "imbalance",
    "window",
    "collectives",
    "optimizer",
    "loader",
    "user_code",
    "runtime",
]
"""compute: forwards and backwards. coding: copying and coding between tensors and the arena.
fill, drain: waiting before the first backward, and after the last forward up to the decision.
In between, what the region waited for was on its way (link_delay), queued for the link or leaving
(link_rate), held back for want of a slot (arena), or not computed yet: because another stage is
slower (imbalance), or for no such reason, so that more in flight would have helped (window).
collectives: among the ranks of a region; 0 for one rank. optimizer: norms, clipping, optimizers
and schedulers. loader, user_code: the script's iterator, and its code between two steps; where
another region waits for those of the first, they have these names there as well. runtime: what
geotrain itself needs to choose, wake up and decide."""
CAUSES: tuple[Spent, ...] = get_args(Spent)

_NAMES: dict[Cause, Spent] = {
    "fill": "fill",
    "drain": "drain",
    "latency": "link_delay",
    "rate": "link_rate",
    "arena": "arena",
    "imbalance": "imbalance",
    "window": "window",
}
WAITS: tuple[Spent, ...] = (
    *("fill", "drain", "link_delay", "link_rate", "arena", "imbalance", "window"),
)
"""Those in which a region waits for another, or for the link between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """What a region itself measured of its step, part after part, in seconds."""

    user_s: float
    """From the previous step's end until the next was asked for, without the loader."""
    loader_s: float
    open_s: float
    """Announcing the step, or waiting for word of it."""
    run_s: float
    """All forwards and backwards, and the waits between them."""
    norms_s: float
    exchange_s: float
    """From this region's vote to the decision."""
    decide_s: float
    """What is made of the votes, besides."""
    commit_s: float
    compute_s: float
    """Within `run_s`, as are the next two."""
    coding_s: float
    arena_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        before_s = self.user_s + self.loader_s + self.open_s
        return (
            before_s + self.run_s + self.norms_s + self.exchange_s + self.decide_s + self.commit_s
        )


def attribute(
    step: LaidOut, timings: Sequence[Timings], spans: Spans, *, own: int
) -> dict[Spent, float]:
    """The seconds of one region's step by cause; they sum to its wall time.

    Args:
        step: All regions' actions by one clock.
        timings: One of each region, in order.
        own: The region that `spans` are of.
    """
    spent: dict[Spent, float] = dict.fromkeys(CAUSES, 0.0)
    spent["compute"], spent["coding"] = spans.compute_s, spans.coding_s
    spent["optimizer"] = spans.norms_s + spans.commit_s
    spent["loader"], spent["user_code"] = spans.loader_s, spans.user_s
    if len(timings) > 1:
        for cause, idle_s in idle_of_s(step, own).items():
            spent[_NAMES[cause]] += idle_s
        # Between an input's arrival and the action there is our own work, too.
        spent["arena"] = min(spent["arena"], spans.arena_s)
        spent["drain"] += spans.exchange_s
        if own > 0:
            _add_opening(spent, timings[0], spans.open_s)
    _even_out(spent, spans.step_s)
    return spent


def _add_opening(spent: dict[Spent, float], first: Timings, open_s: float) -> None:
    """What this region waited for, before it heard of the step."""
    left_s = open_s
    told: dict[Spent, int] = {
        "loader": first.loader_us,
        "user_code": first.user_us,
        "optimizer": first.optimizer_us,
    }
    for cause, us in told.items():
        part_s = min(left_s, us / 1e6)
        spent[cause] += part_s
        left_s -= part_s
    spent["fill"] += left_s


def _even_out(spent: dict[Spent, float], step_s: float) -> None:
    """What is left of the step was ours; where microseconds were rounded up, it is less."""
    spent["runtime"] = step_s - sum(spent.values())
    if spent["runtime"] < 0:
        longest = max(WAITS, key=spent.__getitem__)
        spent[longest] += spent["runtime"]
        spent["runtime"] = 0.0


def in_words(spent_s: Mapping[str, float], *, most: int | None = None) -> str:
    """Such as "compute 71 %, drain 14 %, fill 9 %": the largest first, without what is below 1 %.

    Args:
        most: Not more than so many.
    """
    step_s = sum(spent_s.values())
    if step_s <= 0:
        return ""
    shares = sorted(spent_s.items(), key=lambda item: -item[1])[:most]
    return ", ".join(
        f"{cause.replace('_', ' ')} {seconds / step_s:.0%}".replace("%", " %")
        for cause, seconds in shares
        if seconds >= 0.01 * step_s
    )
