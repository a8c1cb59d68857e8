"""Batches through the pipeline forward only, with one report for all regions at the end."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from geotrain.control.votes import Vote
from geotrain.pipeline.context import Context
from geotrain.pipeline.line import Line
from geotrain.pipeline.opening import (
    Opening,
    check_targets,
    open_batch,
    read_opening,
    refuse_data,
)
from geotrain.pipeline.result import EvalReport
from geotrain.pipeline.runtime import Account, Runtime
from geotrain.pipeline.stage import Stage


class Evaluation:
    """Evaluates this region's segment together with all others."""

    def __init__(self, context: Context, stage: Stage, runtime: Runtime, line: Line) -> None:
        self._context = context
        self._stage = stage
        self._runtime = runtime
        self._line = line

    def run(self, loader: Iterable[Any] | None, max_batches: int | None) -> EvalReport:
        """One evaluation. Batches follow one another without a round trip in between."""
        segment = self._context.parts.segment
        # One by one: a user may keep a part of the model in evaluation mode while it trains.
        modes = [(module, module.training) for module in segment.modules()]
        segment.eval()
        self._stage.reset()
        announced, num_batches = 0.0, 0
        for opening in self._openings(loader, max_batches):
            self._runtime.run(opening.work, Account())
            announced += opening.num_targets
            num_batches += 1
        check_targets(self._context, self._stage, announced)
        vote = Vote(
            region=self._context.place.index,
            finite=True,
            loss_sum=float(self._stage.loss_sum.item()),
            num_targets=self._stage.num_targets,
        )
        votes = self._line.exchange(vote)
        for module, training in modes:
            module.training = training
        total = math.fsum(vote.num_targets for vote in votes)
        loss_sum = math.fsum(vote.loss_sum for vote in votes)
        return EvalReport(
            loss=loss_sum / total if total else math.nan,
            num_tokens=total,
            num_batches=num_batches,
        )

    def _openings(self, loader: Iterable[Any] | None, max_batches: int | None) -> Iterator[Opening]:
        if not self._context.place.is_first:
            refuse_data(self._context, loader)
            yield from self._heard()
            return
        if loader is None:
            raise self._context.error(
                "batch",
                f"evaluate() needs a loader in region {self._context.place.name}, which reads it",
            )
        for number, batch in enumerate(itertools.islice(loader, max_batches)):
            opening, record = open_batch(self._context, "evaluate", batch, number=number)
            self._line.begin(record)
            yield opening
        self._line.begin({"call": "evaluate_end"})

    def _heard(self) -> Iterator[Opening]:
        for number in itertools.count():
            record = self._line.begin(None)
            opening = read_opening(self._context, record, call="evaluate", number=number)
            if opening is None:
                return
            yield opening
