"""One optimizer step, top to bottom.

open      the first region cuts the batch and announces the step down the line
run       every region runs its forwards and backwards by one rule
vote      each region says what it has: finite or not, norms, loss; merged up the line
decide    all regions apply one function to the same set of votes
commit    clip, optimizers, schedulers, hooks; or skip
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from geotrain.control.votes import Decision, Vote, decide
from geotrain.errors import AttachError, RegionError
from geotrain.pipeline.clipping import clip, gradient_norms, total_norm
from geotrain.pipeline.context import Context
from geotrain.pipeline.evaluation import Evaluation
from geotrain.pipeline.explaining import Explaining, Explanation, StepClock
from geotrain.pipeline.following import Following
from geotrain.pipeline.line import Line
from geotrain.pipeline.opening import Opening, check_targets, open_or_hear, refuse_data
from geotrain.pipeline.position import Position
from geotrain.pipeline.result import EvalReport, StepResult
from geotrain.pipeline.room import Room
from geotrain.pipeline.runtime import Account, Runtime
from geotrain.pipeline.snapshot import Snapshot
from geotrain.pipeline.stage import Stage

logger = logging.getLogger(__name__)

CommitHook = Callable[[StepResult], None]


class Pipeline:
    """Trains this region's segment together with all other regions.

    Made by `Region.pipeline`. Every region makes the same calls in the same order; the first
    region leads, the others follow what it announces.
    """

    def __init__(
        self,
        context: Context,
        stage: Stage,
        runtime: Runtime,
        line: Line,
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        hooks: Sequence[CommitHook],
        max_grad_norm: float | None,
    ) -> None:
        self._context = context
        self._place = context.place
        self._stage = stage
        self._runtime = runtime
        self._line = line
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._hooks = hooks
        self._max_grad_norm = max_grad_norm
        index = context.parts.info.parameter_index
        self._parameters = [
            (index[name], parameter) for name, parameter in context.parts.segment.named_parameters()
        ]
        self._position = Position()
        self._snapshot = Snapshot(context, line, optimizers, schedulers, hooks, self._position)
        self._evaluation = Evaluation(context, stage, runtime, line)
        self._following = Following(context, stage)
        self._runtime.room = self._following.room
        self._stop_request = ""
        self._wire_bytes_voted = context.wire_bytes()
        self._explaining = Explaining(context, line)
        self._room = Room(context, stage, optimizers)
        self._error: RegionError | None = None
        self.stop_reason = ""
        """Why the run stopped in order, once it has; the same in every region."""

    @property
    def step_count(self) -> int:
        """Steps done, committed or skipped."""
        return self._position.step

    # ---- the step

    def step(self, batch: Any = None) -> StepResult:
        """Run one optimizer step.

        Args:
            batch: (inputs, targets) of the whole global batch in the first region, each a tensor
                or a tree of tensors, None and scalars; None elsewhere.

        Raises:
            RegionError: Anything that ends the run, the same error in every region.
        """
        result = self._step(batch, call="step")
        assert result is not None
        return result

    def _step(self, batch: Any, *, call: str) -> StepResult | None:
        """The step itself; None where the first region ended the loop instead."""
        with self._named_errors():
            clock = self._explaining.start()
            opening = self._open(batch, call=call)
            if opening is None:
                return None
            clock.mark("open")
            self._room.check(opening)
            account = Account()
            self._stage.reset()
            self._runtime.run(opening.work, account)
            clock.mark("run")
            vote = self._vote(opening, account, clock)
            clock.mark("norms")
            votes = self._line.exchange(vote)
            clock.mark("exchange")
            decision = decide(
                votes, num_targets=opening.num_targets, region_names=self._place.region_names
            )
            self._following.on_votes(votes, opening)
            clock.mark("decide")
            grad_norm = self._commit(decision, opening)
            clock.mark("commit")
            explanation = self._explaining.finish(opening.number, votes, account, clock)
            result = self._result(decision, opening, grad_norm, explanation, account)
            self._finish(result, decision)
            return result

    def _open(self, batch: Any, *, call: str) -> Opening | None:
        """Announce the step, or hear of it."""
        self._following.before(self._position.step + 1)
        return open_or_hear(self._context, self._line, call, batch, number=self._position.step + 1)

    def _vote(self, opening: Opening, account: Account, clock: StepClock) -> Vote:
        """What this region says of the step, once its last backward is done."""
        self._context.set_action(f"vote on step {opening.number}")
        check_targets(self._context, self._stage, opening.num_targets)
        norms = gradient_norms(self._parameters)
        loss_sum = float(self._stage.loss_sum.item())
        wire_bytes = self._context.wire_bytes()
        vote = Vote(
            region=self._place.index,
            finite=math.isfinite(loss_sum) and all(math.isfinite(norm) for _, _, norm in norms),
            norms=tuple(norms),
            loss_sum=loss_sum,
            num_targets=self._stage.num_targets,
            wire_bytes=wire_bytes - self._wire_bytes_voted,
            lrs=tuple(float(group["lr"]) for o in self._optimizers for group in o.param_groups),
            stop=self._stop_request or self._context.stop_requested(),
            figures=self._following.figures(account, opening),
            timings=self._explaining.timings(account, clock),
            spent_us=self._explaining.spent_us,
        )
        self._wire_bytes_voted = wire_bytes
        return vote

    def _commit(self, decision: Decision, opening: Opening) -> float:
        """Apply the decision, which is the same everywhere. Returns the global gradient norm."""
        self._context.set_action(f"commit of step {opening.number}")
        total = total_norm(decision.norms)
        parameters = [parameter for _, parameter in self._parameters]
        if decision.commit:
            if self._max_grad_norm is not None:
                clip(parameters, max_norm=self._max_grad_norm, total=total)
            with self._poisoning():
                for optimizer in self._optimizers:
                    optimizer.step()
                for scheduler in self._schedulers:
                    scheduler.step()
        for parameter in parameters:
            parameter.grad = None
        self._position.advance(samples=opening.num_samples, committed=decision.commit)
        return float(total)

    def _result(
        self,
        decision: Decision,
        opening: Opening,
        grad_norm: float,
        explanation: Explanation,
        account: Account,
    ) -> StepResult:
        return StepResult(
            step=self._position.step,
            loss=decision.loss,
            grad_norm=grad_norm,
            num_tokens=opening.num_targets,
            lrs=decision.lrs,
            committed=decision.commit,
            reason=decision.reason,
            num_microbatches=opening.work.num_microbatches,
            windows=opening.windows,
            step_s=explanation.step_s,
            wan_bytes=decision.wire_bytes,
            attribution_s=explanation.attribution_s,
            regions_s=explanation.regions_s,
            verdicts=explanation.verdicts,
            memory_bytes=self._room.terms,
            trace=tuple(account.trace),
        )

    def _finish(self, result: StepResult, decision: Decision) -> None:
        self.stop_reason = decision.stop
        if decision.stop:  # One that came after this step's vote waits for the next.
            self._stop_request = ""
        if result.committed:
            with self._poisoning():
                for hook in self._hooks:
                    hook(result)
        else:
            logger.warning("step %d skipped everywhere: %s", result.step, result.reason)
        if decision.stop:
            logger.info("stopping after step %d: %s", result.step, decision.stop)
        self._context.report(result)
        self._context.set_action(f"in user code after step {result.step}")

    # ---- the loop

    def fit(self, loader: Iterable[Any] | None, steps: int | None = None) -> Iterator[StepResult]:
        """Train until `steps` steps are done, the loader ends, or somebody asks to stop.

        Args:
            loader: Yields batches in the first region; None elsewhere.
            steps: The step count to reach, counted from the start of the run (also after
                `resume`); by default run.steps, and without that the end of the loader. What the
                first region says holds.
        """
        self.stop_reason = ""
        if self._place.is_first:
            until = steps if steps is not None else self._place.default_steps
            return self._lead(loader, until)
        with self._named_errors():
            refuse_data(self._context, loader)
        return self._follow()

    def _lead(self, loader: Iterable[Any] | None, until: int | None) -> Iterator[StepResult]:
        with self._named_errors():
            if loader is None:
                raise self._context.error(
                    "batch", f"fit() needs a loader in region {self._place.name}, which reads it"
                )
            batches = self._position.start(loader)
        while not self.stop_reason and (until is None or self.step_count < until):
            with self._named_errors():
                self._context.set_action("loading a batch", key="loading a batch")
                with self._explaining.loading():
                    batch = next(batches, None)
            if batch is None:
                break
            result = self._step(batch, call="fit")
            assert result is not None
            yield result
        if not self.stop_reason:
            with self._named_errors():
                self._line.begin({"call": "fit_end"})
                self._line.flush()

    def _follow(self) -> Iterator[StepResult]:
        while not self.stop_reason and (result := self._step(None, call="fit")) is not None:
            yield result

    def request_stop(self, reason: str) -> None:
        """Ask all regions to stop after the same step; from any rank of any region."""
        self._stop_request = reason

    def evaluate(
        self, loader: Iterable[Any] | None, *, max_batches: int | None = None
    ) -> EvalReport:
        """Run batches forward only; the report is the same in every region.

        Args:
            loader: Yields (inputs, targets) in the first region; None elsewhere.
            max_batches: Stop after as many; what the first region says holds.
        """
        with self._named_errors():
            report = self._evaluation.run(loader, max_batches)
            self._context.set_action("in user code after evaluate")
            return report

    # ---- checkpoints

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Write this region's part of a checkpoint of the step just done. Returns its folder.

        Args:
            keep: Once it is on the disk, remove this region's older checkpoints in `folder` but for
                so many newest, this one included; at least 2, for that of another region may still
                be the one before. None keeps all. Only what this run saved, and what lies before
                the step that it resumed from, is counted and removed.
        """
        with self._named_errors():
            return self._snapshot.save(Path(folder), keep=keep)

    def resume(self, folder: str | Path, *, loader: Iterable[Any] | None = None) -> int:
        """Go back to the newest step that every region has complete in `folder`.

        Args:
            loader: What `fit` will be given, so that its position is restored; None elsewhere.

        Returns:
            The step resumed from, 0 where there is none: then nothing has changed.
        """
        with self._named_errors():
            return self._snapshot.resume(Path(folder), loader)

    # ---- errors

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Once others may have committed, a failure here leaves the regions at different states."""
        try:
            yield
        except Exception as exc:
            raise self._context.error(
                "poisoned",
                f"{_text(exc)} while committing; other regions may have committed this step, so "
                f"only a checkpoint leads on: start again and call pipeline.resume()",
            ) from exc

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Whatever goes wrong inside becomes one error that names its place, in every region."""
        if self._error is not None:
            raise self._error
        self._context.step = self._position.step + 1
        try:
            yield
        except RegionError as error:
            self._error = error
            self._context.post_error(error)
            raise
        except AttachError as exc:
            self._error = self._context.daemon_error(str(exc))
            self._context.post_error(self._error)
            raise self._error from exc
        except Exception as exc:  # the user's model, loss, loader or optimizer
            self._error = self._context.error("exception", _text(exc))
            self._context.post_error(self._error)
            raise self._error from exc


def _text(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
