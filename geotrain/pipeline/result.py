"""What a step and an evaluation report.

Figures are the same in every region and rank, but for times and the trace, which are a rank's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from geotrain.control.verdicts import Verdict
from geotrain.pipeline.trace import TracedAction


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step."""

    step: int
    """Number of this step, from 1; skipped steps count."""
    loss: float
    """Mean loss over the targets of the global batch, before the update."""
    grad_norm: float
    """Global 2-norm of the gradient before clipping."""
    num_tokens: float
    """Weight of the targets: what the summed loss was divided by."""
    lrs: tuple[float, ...]
    """Learning rates of this step, of the first region that has an optimizer."""
    committed: bool
    """False where the step was skipped."""
    reason: str
    """Why it was skipped."""
    num_microbatches: int
    windows: tuple[int, ...]
    """Bound on the microbatches in flight, for each region."""
    step_s: float
    """Wall time since the previous step ended, in this region."""
    wan_bytes: int
    """Bytes put on all links, as acknowledged since the previous step."""
    attribution_s: Mapping[str, float]
    """Where this region's wall time went, by the causes in control/attribution.py; they sum to
    step_s."""
    regions_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same of every region's previous step, by region; the same in every region."""
    verdicts: tuple[Verdict, ...] = ()
    """What is off in the run, as far as it can tell: each prints as a line of text; the same in
    every region."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """What this region's stage needs in memory, term by term."""
    trace: tuple[TracedAction, ...] = ()
    """This region's forwards and backwards in the order they ran, as this rank saw them."""

    def metrics(self) -> dict[str, float]:
        """The figures a tracker wants, under flat names."""
        figures = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "num_tokens": self.num_tokens,
            "committed": float(self.committed),
            "num_microbatches": float(self.num_microbatches),
            "step_s": self.step_s,
            "wan_bytes": float(self.wan_bytes),
            "tokens_per_s": self.num_tokens / self.step_s if self.step_s > 0 else 0.0,
        }
        figures |= {f"lr/{index}": lr for index, lr in enumerate(self.lrs)}
        figures |= {f"time/{name}_s": spent for name, spent in self.attribution_s.items()}
        return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """One evaluation."""

    loss: float
    """Mean loss over all targets; NaN when there were none."""
    num_tokens: float
    num_batches: int
