"""A region's whole state, to disk and back: what makes the next step the same bit for bit."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from geotrain.control.votes import Vote
from geotrain.errors import ConfigError
from geotrain.pipeline.checks import check_keep
from geotrain.pipeline.context import Context
from geotrain.pipeline.line import Line
from geotrain.pipeline.opening import check_announced
from geotrain.pipeline.position import Position
from geotrain.state.optimizer import pack_optimizer, unpack_optimizer
from geotrain.state.packing import pack_object, unpack_object

logger = logging.getLogger(__name__)

_MAX_OFFERED_STEPS = 1000
_ATTEMPT_BITS = 63


class Snapshot:
    """Saves and restores parameters, buffers, optimizers, schedulers, hooks and data position."""

    def __init__(
        self,
        context: Context,
        line: Line,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        hooks: Sequence[Any],
        position: Position,
    ) -> None:
        self._context = context
        self._line = line
        self._segment = context.parts.segment
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._hooks = hooks
        self._position = position
        self._saved: dict[Path, set[int]] = {}
        """By folder: the steps that this run has written."""
        self._resumed: dict[Path, int] = {}
        self._attempt = context.view

    @property
    def _stateful(self) -> dict[str, Any]:
        named = {f"scheduler.{index}": each for index, each in enumerate(self._schedulers)}
        for index, hook in enumerate(self._hooks):
            if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
                named[f"hook.{index}"] = hook
        return named

    @property
    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._segment.named_parameters()}

    def save(self, folder: Path, *, keep: int | None = None) -> Path:
        """Write everything as of the step just done; then keep only the newest, see `prune`."""
        checkpoint = _checkpoint()
        check_keep(keep, at_least=checkpoint.MIN_KEPT)
        self._context.set_action(f"saving step {self._position.step}")
        tensors = {f"model/{name}": value for name, value in self._segment.state_dict().items()}
        extra: dict[str, Any] = {"position": self._position.counters()}
        for index, optimizer in enumerate(self._optimizers):
            prefix = f"optimizer.{index}"
            packed, described = pack_optimizer(optimizer, self._names, prefix)
            tensors |= packed
            extra[prefix] = described
        objects: dict[str, Any] = {
            name: stateful.state_dict() for name, stateful in self._stateful.items()
        }
        objects["loader"] = self._position.loader_state()
        objects["loader_random"] = self._position.started_with()
        objects["random"] = _random_states(self._context.place.device)
        for name, value in objects.items():
            packed, described = pack_object(value, name)
            tensors |= packed
            extra[name] = described
        path: Path = checkpoint.save_state(
            folder,
            region=self._context.place.name,
            step=self._position.step,
            attempt=self._attempt,
            tensors=tensors,
            extra=extra,
        )
        root = folder.resolve()
        self._saved.setdefault(root, set()).add(self._position.step)
        if keep is not None:
            checkpoint.prune(
                root,
                region=self._context.place.name,
                saved=self._saved[root],
                resumed=self._resumed.get(root),
                keep=keep,
            )
        self._context.set_action(f"in user code after saving step {self._position.step}")
        return path

    def resume(self, folder: Path, loader: Any) -> int:
        """Agree with all regions on the newest step that each has complete, and go back to it."""
        checkpoint = _checkpoint()
        place = self._context.place
        self._context.set_action(f"resuming from {folder}")
        fingerprint = self._context.parts.info.fingerprint
        attempt = secrets.randbits(_ATTEMPT_BITS)
        record = {"call": "resume", "number": 0, "fingerprint": fingerprint, "attempt": attempt}
        announced = self._line.begin(record if place.is_first else None)
        check_announced(self._context, announced, call="resume", number=0)
        own = checkpoint.complete_saves(folder, place.name)[-_MAX_OFFERED_STEPS:]
        votes = self._line.exchange(Vote(region=place.index, finite=True, saves=tuple(own)))
        votes.sort(key=lambda vote: vote.region)
        common = checkpoint.newest_common([vote.saves for vote in votes])
        newest = {
            name: max((step for step, _ in vote.saves), default=0)
            for name, vote in zip(place.region_names, votes, strict=True)
        }
        self._attempt = int(announced["attempt"])
        if common is None:
            if any(newest.values()):
                logger.warning("no step is complete in all regions (newest: %s)", newest)
            logger.info("starting from step 0: no common checkpoint in %s", folder)
            return 0
        step: int = common[0]
        if len(set(newest.values())) > 1:
            logger.warning("regions' newest steps differ (%s): resuming from %d", newest, step)
        self._restore(folder, step, loader)
        self._saved.clear()  # what was saved of later steps is not of this run any more
        self._resumed = {folder.resolve(): step}
        self._context.set_action(f"in user code after resuming step {step}")
        logger.info("resumed from step %d in %s", step, folder)
        return step

    def _restore(self, folder: Path, step: int, loader: Any) -> None:
        checkpoint = _checkpoint()
        tensors, extra = checkpoint.load_state(folder, region=self._context.place.name, step=step)
        model = {
            name.removeprefix("model/"): value
            for name, value in tensors.items()
            if name.startswith("model/")
        }
        wanted = self._segment.state_dict()
        checkpoint.check_names(model, wanted, region=self._context.place.name, what=f"step {step}")
        self._segment.load_state_dict(model)
        for index, optimizer in enumerate(self._optimizers):
            prefix = f"optimizer.{index}"
            unpack_optimizer(optimizer, self._names, prefix, tensors, _part(extra, prefix))
        for name, stateful in self._stateful.items():
            stateful.load_state_dict(unpack_object(tensors, _part(extra, name)))
        self._position.restore(
            extra["position"],
            loader=loader,
            loader_state=unpack_object(tensors, extra["loader"]),
            started_with=unpack_object(tensors, extra["loader_random"]),
        )
        _set_random_states(unpack_object(tensors, extra["random"]), self._context.place.device)


def _checkpoint() -> Any:
    """Imported on first use: torch's checkpointing takes a second to import."""
    from geotrain.state import checkpoint

    return checkpoint


def _part(extra: Mapping[str, Any], name: str) -> Any:
    if name not in extra:
        raise ConfigError(
            f"the checkpoint has no {name}; give region.pipeline() the optimizers, schedulers and "
            f"hooks that it was saved with"
        )
    return extra[name]


def _random_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
