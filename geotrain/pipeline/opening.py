"""How a batch starts: cut and announced by the first region, heard by the others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from geotrain.pipeline.context import Context
from geotrain.pipeline.line import Line
from geotrain.pipeline.microbatch import batch_size, split_batch, split_sizes
from geotrain.pipeline.runtime import Work
from geotrain.pipeline.stage import Stage, Weight
from geotrain.pipeline.window import resolve_windows

Call = Literal["step", "evaluate"]

_MODES: dict[str, str] = {"step": "forward", "evaluate": "evaluate"}


_ANNOUNCED: dict[str, tuple[str, ...]] = {
    "fit": ("step", "fit_end"),
    "evaluate": ("evaluate", "evaluate_end"),
}
"""What the first region may announce to a region that made this call."""
_ENDS = ("fit_end", "evaluate_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """One batch, as all regions know it."""

    call: Call
    number: int
    """Index of the step, or of the batch in an evaluation."""
    num_samples: int
    num_targets: float
    windows: tuple[int, ...]
    work: Work


def open_batch(
    context: Context, call: Call, batch: Any, *, number: int
) -> tuple[Opening, dict[str, Any]]:
    """Cut a batch in the first region.

    Returns:
        The opening, and the record that announces it to the others.

    Raises:
        RegionError: A batch that cannot be trained on.
    """
    inputs, targets = _checked(context, batch)
    place = context.place
    try:
        num_samples = batch_size((inputs, targets))
    except ValueError as exc:
        raise context.error("batch", str(exc)) from exc
    if num_samples == 0:
        raise context.error("batch", "the batch has no samples")
    if call == "step" and place.global_batch is not None and num_samples > place.global_batch:
        raise context.error(
            "batch",
            f"the batch has {num_samples} samples, run.global_batch is {place.global_batch}; give "
            f"the loader batch_size={place.global_batch}",
        )
    try:
        num_targets = float(context.parts.loss.num_targets(targets))
    except ValueError as exc:
        raise context.error("targets", str(exc)) from exc
    sizes = split_sizes(num_samples, context.num_microbatches) if num_targets else ()
    windows = resolve_windows(
        context.window,
        num_stages=len(place.region_names),
        num_microbatches=max(1, len(sizes)),
    )
    record = {
        "call": call,
        "number": number,
        "samples": num_samples,
        "targets": num_targets,
        "microbatches": len(sizes),
        "windows": list(windows),
        "loss_scale": 1.0,
        "fingerprint": context.parts.info.fingerprint,
    }
    microbatches = split_batch((inputs, targets), sizes)
    return _opening(context, record, microbatches), record


def _checked(context: Context, batch: Any) -> tuple[Any, Any]:
    if batch is None:
        raise context.error(
            "batch", f"no batch was given, but region {context.place.name} reads the data"
        )
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise context.error(
            "batch", f"a batch must be (inputs, targets), not a {type(batch).__name__}"
        )
    return batch[0], batch[1]


def refuse_data(context: Context, data: Any) -> None:
    """Raises RegionError where a region that does not read the data was given some."""
    if data is not None:
        raise context.error(
            "batch",
            f"region {context.place.name} was given data, but only region "
            f"{context.place.first_name} reads it; pass None where region.reads_data is False",
        )


def open_or_hear(
    context: Context, line: Line, call: str, batch: Any, *, number: int
) -> Opening | None:
    """Announce a step in the first region, hear of it in the others.

    Args:
        call: "step" or "fit": what this region called.

    Returns:
        The opening, or None when the first region ended the loop.
    """
    if context.place.is_first:
        opening, record = open_batch(context, "step", batch, number=number)
        line.begin(record)
        return opening
    refuse_data(context, batch)
    return read_opening(context, line.begin(None), call=call, number=number)


def check_targets(context: Context, stage: Stage, announced: float) -> None:
    """Raises RegionError unless the last region counted what the first region divided by."""
    place, found = context.place, stage.num_targets
    if place.is_last and not math.isclose(found, announced, rel_tol=1e-9):
        raise context.error(
            "targets",
            f"region {place.name} counts {found:g} targets, region {place.first_name} announced "
            f"{announced:g}; num_targets must give the same total for a batch as for its "
            f"microbatches",
        )


def read_opening(
    context: Context, record: Mapping[str, Any], *, call: str, number: int
) -> Opening | None:
    """Understand a batch that the first region announced.

    Returns:
        The opening, or None when the first region ended the loop that `call` is in.

    Raises:
        RegionError: See `check_announced`.
    """
    check_announced(context, record, call=call, number=number)
    return None if record["call"] in _ENDS else _opening(context, record, [])


def check_announced(context: Context, record: Mapping[str, Any], *, call: str, number: int) -> None:
    """Compare what the first region announced with what this one called.

    Args:
        call: What this region called: "fit", "step", "evaluate" or "resume".

    Raises:
        RegionError: The first region does something else, or another model or step.
    """
    place = context.place
    announced = record.get("call")
    expected = _ANNOUNCED.get(call, (call,))
    if announced not in expected:
        raise context.error(
            "call",
            f"region {place.name} called {call} while region {place.first_name} called "
            f"{str(announced).removesuffix('_end')}; all regions must run the same loop",
        )
    if announced in _ENDS:
        return
    fingerprint = context.parts.info.fingerprint
    if record.get("fingerprint") != fingerprint:
        raise context.error(
            "mismatch",
            f"region {place.first_name} trains model {record.get('fingerprint')}, region "
            f"{place.name} model {fingerprint}; all regions must build the same model",
        )
    if record.get("number") != number:
        raise context.error(
            "mismatch",
            f"region {place.first_name} is at {call} {record.get('number')}, region {place.name} "
            f"at {number}; resume all regions from the same checkpoint",
        )


def _opening(
    context: Context, record: Mapping[str, Any], microbatches: list[tuple[Any, Any]]
) -> Opening:
    place = context.place
    windows = tuple(int(window) for window in record["windows"])
    own = windows[place.index]
    if place.in_flight_limit is not None:
        own = min(own, place.in_flight_limit)
    if place.in_flight_samples is not None and record["microbatches"]:
        largest = -(-int(record["samples"]) // int(record["microbatches"]))
        own = min(own, place.in_flight_samples // largest)
    num_targets = float(record["targets"])
    return Opening(
        call=record["call"],
        number=int(record["number"]),
        num_samples=int(record["samples"]),
        num_targets=num_targets,
        windows=windows,
        work=Work(
            mode=_MODES[record["call"]],
            step=int(record["number"]),
            num_microbatches=int(record["microbatches"]),
            window=max(1, own),
            weight=Weight(num_targets=num_targets, loss_scale=float(record["loss_scale"])),
            microbatches=microbatches,
        ),
    )
