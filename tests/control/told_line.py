"""What the regions of a simulated step would tell of it: each by a clock of its own."""

from collections.abc import Sequence

from geotrain.control.timings import Ran, Timings
from geotrain.pipeline.simulate import Simulated

ORIGIN_S = (1000.0, 50.0, 72_000.0, 3.0)
"""What the regions' clocks show as the step begins: they were started at different times."""


def us(seconds: float) -> int:
    return round(seconds * 1e6)


def timings_of(
    step: Simulated,
    *,
    at_s: float = 0.0,
    latency_s: Sequence[float] = (),
    sizes: Sequence[int] | None = None,
    **changes: int,
) -> list[Timings]:
    """The reports of all regions on a step that begins at `at_s`.

    Args:
        latency_s: Of each boundary: word of the step takes so long.
        sizes: Bytes of each microbatch's boundary tensor; 1 MiB by default.
    """
    reports, opened_s = [], 0.0
    for stage, runs in enumerate(step.runs):
        opened_s += latency_s[stage - 1] if stage > 0 and latency_s else 0.0
        came = {}
        if stage > 0:
            came |= {("F", m): each.arrived_s for m, each in enumerate(step.forward[stage - 1])}
        if stage < len(step.runs) - 1:
            came |= {("B", m): each.arrived_s for m, each in enumerate(step.backward[stage])}
        told = {"F": [], "B": []}
        for run in runs:
            size = sizes[run.microbatch] if sizes is not None else 1 << 20
            told[run.kind].append(
                Ran(
                    run.microbatch,
                    us(run.begin_s),
                    us(run.end_s) - us(run.begin_s),
                    us(came.get((run.kind, run.microbatch), run.begin_s)),
                    size if run.kind == "F" else 0,
                )
            )
        reports.append(
            Timings(
                origin_us=us(ORIGIN_S[stage] + at_s),
                heard_us=us(opened_s),
                opened_us=us(opened_s),
                forward=tuple(told["F"]),
                backward=tuple(told["B"]),
                **changes,
            )
        )
    return reports
