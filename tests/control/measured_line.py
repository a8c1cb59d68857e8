"""What the regions of a simulated step would have measured, as they would report it."""

from geotrain.control.figures import RECORD, Figures, Hold, Passage
from geotrain.pipeline.simulate import Delivery, PipelineModel, Run, Simulated


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _times_us(step: Simulated, stage: int, kind: str) -> tuple[int, ...]:
    return tuple(_us(r.end_s - r.begin_s) for r in step.runs[stage] if r.kind == kind)


def _ends(
    number: int, deliveries: list[Delivery], runs: list[Run], kind: str, back_s: float
) -> tuple[list[Passage], list[Hold]]:
    """Both ends of one direction: a tensor is acknowledged when the receiver takes it."""
    taken_s = {run.microbatch: run.begin_s for run in runs if run.kind == kind}
    passages, holds = [], []
    for microbatch, each in enumerate(deliveries):
        way_s = taken_s[microbatch] + back_s - each.sent_s
        passages.append(Passage(number, microbatch, _us(each.sent_s - 100.0), _us(way_s)))
        holds.append(Hold(number, microbatch, _us(taken_s[microbatch] - each.arrived_s)))
    return passages, holds


def figures_of(
    number: int,
    model: PipelineModel,
    step: Simulated,
    *,
    limits: tuple[int, ...] = (),
    memory: int = 0,
) -> list[Figures]:
    """The reports of all regions on step `number`."""
    parts: list[dict] = [
        {
            "forward_us": _times_us(step, stage, "F"),
            "backward_us": _times_us(step, stage, "B"),
            "in_flight_limit": limits[stage] if limits else 0,
            "memory_limit": memory,
        }
        for stage in range(len(step.runs))
    ]
    for index, boundary in enumerate(model.boundaries):
        there, back = boundary.forward.latency_s, boundary.backward.latency_s
        sent, held = _ends(number, step.forward[index], step.runs[index + 1], "F", back)
        # The record that opens the step; the region behind was busy and took it late.
        sent.insert(0, Passage(number, RECORD, -101_000_000, _us(there + back + 0.5)))
        held.insert(0, Hold(number, RECORD, 500_000))
        parts[index]["sent_down"], parts[index + 1]["held_from_up"] = tuple(sent), tuple(held)
        sent, held = _ends(number, step.backward[index], step.runs[index], "B", there)
        parts[index + 1]["sent_up"], parts[index]["held_from_down"] = tuple(sent), tuple(held)
        parts[index]["slots_down"] = boundary.forward.slots or 0
        parts[index + 1]["slots_up"] = boundary.backward.slots or 0
    return [Figures(**part) for part in parts]
