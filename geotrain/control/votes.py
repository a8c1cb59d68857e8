"""What a region says of its part of a step, and what all regions make of it.

Every region applies `decide` to the same full set of votes, so all come to the same decision
without asking anyone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geotrain.control.figures import Figures
from geotrain.control.timings import Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One region's account of one step."""

    region: int
    """Position of the region in the line."""
    finite: bool
    """Whether its gradients, and in the last region the loss, hold neither NaN nor Inf."""
    norms: tuple[tuple[int, str, float], ...] = ()
    """(index of the parameter in the whole model, dtype of the norm, norm of its gradient)."""
    loss_sum: float = 0.0
    """Sum of losses over the targets this region saw; only the last region has any."""
    num_targets: float = 0.0
    """Weight of the targets this region saw; only the last region has any."""
    wire_bytes: int = 0
    """Bytes that its daemon put on the WAN for it, as acknowledged since its previous vote."""
    lrs: tuple[float, ...] = ()
    """Learning rate of each of its optimizers' parameter groups."""
    stop: str = ""
    """Reason for which this region asks all to stop after this step; empty: go on."""
    saves: tuple[tuple[int, int], ...] = ()
    """(step, attempt) of each whole checkpoint it has on disk, where resuming is what is voted."""
    figures: Figures | None = None
    """What the region measured, where the plan follows that."""
    timings: Timings | None = None
    """What it did when, in a step."""
    spent_us: tuple[int, ...] = ()
    """Where its previous step went: one number for each of attribution.CAUSES; none before."""

    def to_record(self) -> dict[str, Any]:
        return {
            "region": self.region,
            "finite": self.finite,
            "index": [index for index, _, _ in self.norms],
            "dtype": [dtype for _, dtype, _ in self.norms],
            "norm": [norm for _, _, norm in self.norms],
            "loss_sum": self.loss_sum,
            "num_targets": self.num_targets,
            "wire_bytes": self.wire_bytes,
            "lrs": list(self.lrs),
            "stop": self.stop,
            "saves": [list(saved) for saved in self.saves],
            "figures": self.figures.to_record() if self.figures is not None else None,
            "timings": self.timings.to_record() if self.timings is not None else None,
            "spent_us": list(self.spent_us),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Vote":
        """Read a peer's vote. Raises ValueError for one that does not add up."""
        try:
            figures, timings = record["figures"], record["timings"]
            norms = zip(record["index"], record["dtype"], record["norm"], strict=True)
            return cls(
                region=int(record["region"]),
                finite=bool(record["finite"]),
                norms=tuple((int(i), str(dtype), float(norm)) for i, dtype, norm in norms),
                loss_sum=float(record["loss_sum"]),
                num_targets=float(record["num_targets"]),
                wire_bytes=int(record["wire_bytes"]),
                lrs=tuple(float(lr) for lr in record["lrs"]),
                stop=str(record["stop"]),
                saves=tuple((int(step), int(attempt)) for step, attempt in record["saves"]),
                figures=Figures.from_record(figures) if figures is not None else None,
                timings=Timings.from_record(timings) if timings is not None else None,
                spent_us=tuple(int(us) for us in record["spent_us"]),
            )
        except (KeyError, TypeError) as exc:
            raise ValueError(f"malformed vote: {exc!r}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What every region does with a step."""

    commit: bool
    reason: str
    """Why the step is skipped; empty when it is committed."""
    loss: float
    """Mean loss over the targets of the global batch; NaN without targets."""
    norms: tuple[tuple[str, float], ...]
    """(dtype, norm) of every gradient, in the whole model's parameter order."""
    wire_bytes: int
    lrs: tuple[float, ...]
    stop: str


def check_set(votes: Sequence[Vote], *, num_regions: int) -> None:
    """Raises ValueError unless there is exactly one vote of each region."""
    found = sorted(vote.region for vote in votes)
    if found != list(range(num_regions)):
        raise ValueError(f"votes of regions {found}, expected one of each of {num_regions}")


def decide(votes: Sequence[Vote], *, num_targets: float, region_names: Sequence[str]) -> Decision:
    """The one function that all regions apply to the same set of votes.

    A step is skipped where any region met NaN or Inf, and where the batch had no target at all.
    """
    ordered = sorted(votes, key=lambda vote: vote.region)
    broken = [region_names[vote.region] for vote in ordered if not vote.finite]
    loss_sum = math.fsum(vote.loss_sum for vote in ordered)
    if broken:
        reason = f"NaN or Inf in {' and '.join(broken)}"
    elif num_targets == 0:
        reason = "the batch has no targets"
    else:
        reason = ""
    norms = sorted((index, dtype, norm) for vote in ordered for index, dtype, norm in vote.norms)
    stops = [f"{region_names[v.region]}: {v.stop}" for v in ordered if v.stop]
    return Decision(
        commit=not reason,
        reason=reason,
        loss=loss_sum / num_targets if num_targets else math.nan,
        norms=tuple((dtype, norm) for _, dtype, norm in norms),
        wire_bytes=sum(vote.wire_bytes for vote in ordered),
        lrs=next((vote.lrs for vote in ordered if vote.lrs), ()),
        stop="; ".join(stops),
    )
