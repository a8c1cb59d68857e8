"""What a demo of any size knows after some steps, in made-up figures."""

from typing import Any

from geotrain.control.attribution import CAUSES
from geotrain.lab.demo.options import Options
from geotrain.lab.demo.state import RunState, StepLine

MICROBATCHES = 4
RTT_S = 0.1


def step_record(
    index: int, step: int, *, options: Options, now: float | None = None, **changes: Any
) -> dict[str, Any]:
    """What the training process of region `index` prints: a step of one second.

    Each region runs its forwards of 20 ms, waits, and runs its backwards of 40 ms.
    """
    ended_s = float(step) if now is None else now
    began_s = ended_s - 1.0
    first = began_s + 0.05 * index
    second = first + 0.4
    trace = [["F", m, first + 0.02 * m, first + 0.02 * m + 0.02] for m in range(MICROBATCHES)]
    trace += [["B", m, second + 0.04 * m, second + 0.04 * m + 0.04] for m in range(MICROBATCHES)]
    record = {
        "event": "step",
        "step": step,
        "loss": 6.0 - 0.5 * step,
        "grad_norm": 2.0,
        "num_tokens": 4096.0,
        "step_s": 1.0,
        "num_microbatches": MICROBATCHES,
        "windows": options.windows,
        "wan_bytes": 4_200_000,
        "committed": True,
        "reason": "",
        "attribution_s": dict.fromkeys(CAUSES, 0.0) | {"compute": 0.24, "drain": 0.6, "fill": 0.16},
        "verdicts": [],
        "ended_s": ended_s,
        "trace": trace,
    }
    return record | changes


def step_line(index: int, step: int, *, options: Options, **changes: Any) -> StepLine:
    return StepLine.from_json(step_record(index, step, options=options, **changes))


def link_record(**changes: Any) -> dict[str, Any]:
    """A daemon's word of one link."""
    record = {
        "state": "connected",
        "since_s": 2.0,
        "reason": "",
        "rtt_s": {"min": RTT_S, "p50": 0.101, "p99": 0.104, "last": 0.1023},
        "rate_bytes_per_s": {"send": 12.5e6, "receive": None},
        "bytes_sent": 6_000_000,
        "bytes_received": 6_000_000,
        "payload_bytes_sent": 8_000_000,
        "lanes_opened": 1,
    }
    return record | changes


def status_record(index: int, *, options: Options, action: str = "", **link: Any) -> dict[str, Any]:
    """The status document of region `index`, as far as it is looked at."""
    names = options.names
    peers = [names[i] for i in (index - 1, index + 1) if 0 <= i < len(names)]
    egress = {"usd_today": 0.001, "usd_per_hour": 0.25, "usd_per_million_tokens": 0.5}
    return {
        "ranks": [{"action": action or f"waiting for backward {index} of step 4"}],
        "links": {peer: link_record(**link) for peer in peers},
        "egress": egress,
    }


def running(regions: int, *, steps: int = 3, **options: Any) -> RunState:
    """A demo that began at second 0 and has done so many steps of one second."""
    asked = Options(regions=regions, microbatches=MICROBATCHES, **options)
    state = RunState(asked, started_at=0.0)
    for index in range(regions):
        if regions > 1:
            state.on_status(index, status_record(index, options=asked), now=float(steps))
        for step in range(1, steps + 1):
            state.on_line(index, step_line(index, step, options=asked))
    return state
