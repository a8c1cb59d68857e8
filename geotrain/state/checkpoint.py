"""Checkpoints of one region, written by torch.distributed.checkpoint (DCP).

    <root>/step-00000500/<region>/   .metadata, *.distcp   what DCP writes: the tensors
                                     extra.json            all that is not a tensor
                                     meta.json             format, step, region, files; last

A folder is written under another name, flushed to the disk and renamed: a step is there whole or
not at all. Several regions may share one root or have one each.
"""

import contextlib
import logging
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from geotrain.errors import ConfigError
from geotrain.state.dcp_metadata import read_tensor_layout
from geotrain.state.errors import CheckpointError
from geotrain.state.manifest import (
    EXTRA_NAME,
    check_manifest,
    dropped_folder,
    existing_folder,
    read_json,
    region_folder,
    replaced_folder,
    steps_in,
    sync_folder,
    write_json,
    write_manifest,
    writing_folder,
)
from geotrain.state.optimizer import describe_difference

logger = logging.getLogger(__name__)

MIN_KEPT = 2
"""Regions' newest may differ by one save, and the older one is then what all have."""


def save_state(
    root: Path,
    *,
    region: str,
    step: int,
    attempt: int = 0,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
) -> Path:
    """Write one region's state at one step, and return once it is on the disk.

    A step that is there already is replaced; whatever happens meanwhile, one of the two is whole.
    One writer per region and root: leftovers of an earlier, killed one are removed.

    Args:
        root: Made where absent.
        attempt: See `Saved`.
        tensors: Flat, by name ("model/layers.3.weight"), on any device.
        extra: For json.dump, with string keys only; `pack_object` makes such values.

    Returns:
        The region's folder.

    Raises:
        CheckpointError: The disk is full, read-only and the like.
        ConfigError: A value of `tensors` is none.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name}: a {type(value).__name__} cannot be saved among the tensors of a "
                "checkpoint; give modules buffers instead of get_extra_state()"
            )
    writing = writing_folder(root, step, region)
    try:
        for stale in root.glob(f"step-*/{writing.name}"):
            shutil.rmtree(stale)
        writing.mkdir(parents=True)
        try:
            with _dcp_in_one_process():
                save(dict(tensors), storage_writer=FileSystemWriter(writing), no_dist=True)
            write_json(writing / EXTRA_NAME, extra)
            write_manifest(
                writing,
                region=region,
                step=step,
                attempt=attempt,
                geotrain_version=version("geotrain"),
            )
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        return _put_in_place(root, step, region)
    except OSError as exc:
        raise CheckpointError(
            f"region {region}: step {step} cannot be saved under {root}: {exc}; "
            "free space or choose another folder, older checkpoints are untouched"
        ) from exc


class Saved(NamedTuple):
    """A whole checkpoint of one region.

    `attempt` is the same number in all regions from one resume to the next. A step that one
    attempt saved in one region, and a later one, which went back and took another way, in another
    region, are no checkpoint of any run.
    """

    step: int
    attempt: int


def complete_saves(root: Path, region: str) -> list[Saved]:
    """Of each step of which this region has a whole checkpoint under `root`, ascending.

    Sizes are compared, hashes only by `load_state`. A damaged one is left out and logged.
    """
    complete = []
    for step, found in _surveyed(root, region):
        if isinstance(found, CheckpointError):
            logger.warning("! checkpoint of step %d is left out: %s", step, found)
        else:
            complete.append(Saved(step, found))
    return complete


def complete_steps(root: Path, region: str) -> list[int]:
    """The steps of `complete_saves`."""
    return [saved.step for saved in complete_saves(root, region)]


def _surveyed(root: Path, region: str) -> Iterator[tuple[int, int | CheckpointError]]:
    """Each step of which this region has something: whose attempt, or what is wrong with it."""
    for step in steps_in(root):
        folder = existing_folder(root, step, region)
        if folder is None:
            continue
        try:
            attempt = check_manifest(folder, region=region, step=step, hashes=False)
        except CheckpointError as exc:
            yield step, exc
        else:
            yield step, attempt


def newest_common(sets: Sequence[Collection[tuple[int, int]]]) -> tuple[int, int] | None:
    """The newest (step, attempt) that every region holds, or None. Pure."""
    if not sets:
        return None
    return max(set(sets[0]).intersection(*sets[1:]), default=None)


def superseded(
    complete: Iterable[int], *, saved: Collection[int], resumed: int | None, keep: int
) -> list[int]:
    """The steps that are not among the `keep` newest of this run, ascending. Pure.

    Of this run are the steps that it saved and those up to the one it resumed from. Others, such as
    later ones of a run that was given up, neither count nor go: counted, they could push out the
    one step that all regions have.

    Regions save by themselves, but none gets to its next save before all have done the one before:
    their newest differ by one save at most, so with the two newest of each a common one remains.
    """
    assert keep >= MIN_KEPT, "the caller checks what a user gives"
    own = sorted(
        step for step in complete if step in saved or (resumed is not None and step <= resumed)
    )
    return own[:-keep]


def prune(
    root: Path, *, region: str, saved: Collection[int], resumed: int | None, keep: int
) -> list[int]:
    """Remove what `superseded` names of this region's; returns the steps.

    A kill leaves each either whole or gone for a reader. A file that cannot be removed is no reason
    to end a run: it is logged, and tried again after the next save.
    """
    complete = [step for step, found in _surveyed(root, region) if isinstance(found, int)]
    steps = superseded(complete, saved=saved, resumed=resumed, keep=keep)
    try:
        for step in steps:
            _drop(root, step, region)
        # What a kill left half removed.
        for step in steps_in(root):
            _remove(dropped_folder(root, step, region))
    except OSError as exc:
        logger.warning("! an old checkpoint under %s cannot be removed: %s", root, exc)
    return steps


def _drop(root: Path, step: int, region: str) -> None:
    dropped = dropped_folder(root, step, region)
    for folder in (replaced_folder(root, step, region), region_folder(root, step, region)):
        if folder.exists():
            _remove(dropped)
            folder.rename(dropped)
            _remove(dropped)


def _remove(dropped: Path) -> None:
    """And the step's folder with it, unless another region has something there."""
    if dropped.exists():
        shutil.rmtree(dropped)
        with contextlib.suppress(OSError):
            dropped.parent.rmdir()


def load_state(root: Path, *, region: str, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_state` wrote: the tensors, newly allocated on the CPU, and `extra`.

    Raises:
        CheckpointError: It is not there, damaged, or another region's.
    """
    folder = existing_folder(root, step, region)
    if folder is None:
        held = ", ".join(map(str, complete_steps(root, region)[-5:])) or "none"
        raise CheckpointError(
            f"{region_folder(root, step, region)} is missing; "
            f"whole checkpoints of region {region} under {root}: {held}"
        )
    check_manifest(folder, region=region, step=step, hashes=True)
    layout = read_tensor_layout(folder / ".metadata")
    tensors: dict[str, Any] = {
        name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in layout.items()
    }
    try:
        with _dcp_in_one_process():
            load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    except OSError as exc:
        raise CheckpointError(f"{folder} cannot be read ({exc}); resume from another step") from exc
    return tensors, read_json(folder / EXTRA_NAME)


def check_names(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, region: str, what: str
) -> None:
    """Make sure that a checkpoint has just the tensors that the model wants, of the same shapes.

    Args:
        what: What is loaded, for the error: "model, step 500".

    Raises:
        CheckpointError: Names or shapes differ; names the first few.
    """
    if tensors.keys() != wanted.keys():
        difference = describe_difference(set(tensors), set(wanted))
        raise CheckpointError(
            f"region {region}, {what}: {difference}; resume with the model and split "
            "that the checkpoint was written with"
        )
    for name, tensor in wanted.items():
        found = tensors[name]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f'region {region}, {what}: "{name}" is {found.dtype} {tuple(found.shape)} in the '
                f"checkpoint and {tensor.dtype} {tuple(tensor.shape)} in this script's model; "
                "resume with the same model and precision"
            )


def _put_in_place(root: Path, step: int, region: str) -> Path:
    """Rename the finished folder, any old one aside first, and flush the renames."""
    final = region_folder(root, step, region)
    replaced = replaced_folder(root, step, region)
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)  # readers look here while `final` is absent
    writing_folder(root, step, region).rename(final)
    sync_folder(final.parent)
    sync_folder(root)
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


@contextmanager
def _dcp_in_one_process() -> Iterator[None]:
    """DCP warns at every call without a process group, and wraps errors in a BaseException."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"torch\.distributed is disabled, unavailable or uninit", UserWarning
        )
        try:
            yield
        except CheckpointException as exc:
            cause = next(iter(exc.failures.values()))[0]
            # The tensor files' own reader reports damage as RuntimeError and the like.
            if isinstance(cause, Exception) and not isinstance(cause, OSError):
                raise OSError(f"{type(cause).__name__}: {cause}") from cause
            raise cause from None
