"""What the regions of a simulated step would have measured, as they would report it."""

from dataclasses import replace

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


_SENT_TO_REPORT_US = 100_000_000
"""By how much `figures_of` has every tensor sent before the moment that its times count from."""


class Reporter:
    """Reports as they really come: what is acknowledged after a region's vote is in its next."""

    def __init__(self) -> None:
        self._late: dict[tuple[int, str], list[Passage]] = {}

    def figures_of(
        self, number: int, model: PipelineModel, step: Simulated, **others: object
    ) -> list[Figures]:
        reports = figures_of(number, model, step, **others)  # type: ignore[arg-type]
        for stage, report in enumerate(reports):
            voted_us = _us(step.runs[stage][-1].end_s) - _SENT_TO_REPORT_US
            for name in ("sent_down", "sent_up"):
                own: tuple[Passage, ...] = getattr(report, name)
                late = [p for p in own if p.sent_us + p.returned_us > voted_us]
                known = [p for p in own if p not in late]
                earlier = self._late.get((stage, name), [])
                self._late[stage, name] = [
                    p._replace(sent_us=p.sent_us - _SENT_TO_REPORT_US) for p in late
                ]
                report = replace(report, **{name: (*known[:1], *earlier, *known[1:])})
            reports[stage] = report
        return reports
