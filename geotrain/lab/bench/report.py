"""The figures of `geotrain bench step`, as JSON and as a small table."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from geotrain.control.ideal import Costs, ideal_step_s, lower_bound_s
from geotrain.lab.bench.options import BenchOptions
from geotrain.lab.bench.peers import Peer
from geotrain.lab.bench.phases import phase_lines

_STOCK = ("torch_1f1b", "torch_gpipe")


def report(
    options: BenchOptions,
    *,
    step_s: float,
    steps: Sequence[Mapping[str, Any]],
    emulator: str,
    congestion: Mapping[str, str | None],
    load: float,
    peers: Mapping[str, Peer] | str | None,
    taken: Sequence[Mapping[str, float]] | None = None,
    plans: Sequence[Mapping[str, Any]] = (),
    phases: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Every field of the JSON object.

    Args:
        taken: What forwards and backwards really took in each region; None where not all said.
        plans: What the steps ran under, each from its step on, and why.
        phases: Of a run whose links a script changed.
        peers: What was compared with, why nothing could be, or None where nothing was asked for.
    """
    costs = options.costs_with(steps[-1]["num_microbatches"])
    ideal_s = ideal_step_s(costs)
    busy_s = costs.num_microbatches * costs.slowest_s
    result = {
        "step_s": step_s,
        "ideal_s": ideal_s,
        "lower_bound_s": lower_bound_s(costs),
        "link_s": costs.link_s,
        "ratio": step_s / ideal_s if ideal_s > 0 else None,
        "windows": steps[-1]["windows"],
        "num_microbatches": steps[-1]["num_microbatches"],
        "bubble": 1 - busy_s / step_s,
        "measured": _measured(costs, taken, step_s),
        "plans": list(plans),
        "phases": list(phases),
        "num_steps": len(steps),
        "num_steps_asked": options.work.steps,
        "all_step_s": [step["step_s"] for step in steps],
        "all_windows": [step["windows"] for step in steps],
        "all_num_microbatches": [step["num_microbatches"] for step in steps],
        "attribution_s": steps[-1]["attribution_s"],
        "rtt_ms": options.rtt_s * 1e3,
        "mbit": options.mbit,
        "loss": options.loss,
        "jitter_ms": options.jitter_s * 1e3,
        "emulator": emulator,
        "congestion": dict(congestion),
        "load": load,
        "num_cpus": os.cpu_count(),
    }
    return result | _compared(step_s, peers)


def _measured(
    costs: Costs, taken: Sequence[Mapping[str, float]] | None, step_s: float
) -> dict[str, Any] | None:
    """The ideal with what the stages really took, beside that with what was asked for."""
    if taken is None:
        return None
    real = replace(
        costs,
        forward_s=[each["forward_s"] for each in taken],
        backward_s=[each["backward_s"] for each in taken],
    )
    ideal_s = ideal_step_s(real)
    return {
        "forward_s": list(real.forward_s),
        "backward_s": list(real.backward_s),
        "slowest_s": real.slowest_s,
        "asked_slowest_s": costs.slowest_s,
        "ideal_s": ideal_s,
        "ratio": step_s / ideal_s if ideal_s > 0 else None,
    }


def _compared(step_s: float, peers: Mapping[str, Peer] | str | None) -> dict[str, Any]:
    """The peers' part; a speedup is None where no peer has a step to compare with."""
    if peers is None or isinstance(peers, str):
        empty: dict[str, Any] = {"peer_step_s": {}, "peer_notes": {}, "torch_csv_widths": {}}
        return empty | {"speedup": None, "speedup_stock": None, "peer_reason": peers or ""}
    widths = {name.removeprefix("csv"): p for name, p in peers.items() if name.startswith("csv")}
    stock = {f"torch_{name}": p for name, p in peers.items() if not name.startswith("csv")}
    times = {name: peer.step_s for name, peer in stock.items()}
    notes = {name: peer.note for name, peer in stock.items() if peer.note}
    notes |= {f"torch_csv, width {width}": peer.note for width, peer in widths.items() if peer.note}
    times["torch_csv"] = _least([peer.step_s for peer in widths.values()])
    fastest = _least(list(times.values()))
    fastest_stock = _least([times.get(name) for name in _STOCK])
    return {
        "peer_step_s": times,
        "peer_notes": notes,
        "torch_csv_widths": {width: peer.step_s for width, peer in widths.items()},
        "speedup": fastest / step_s if fastest is not None else None,
        "speedup_stock": fastest_stock / step_s if fastest_stock is not None else None,
        "peer_reason": "",
    }


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    sites = result["congestion"]["sites"] or "the machine's"
    link = f"{result['rtt_ms']:g} ms round trip, {result['mbit']:g} Mbit/s"
    link += f", loss {result['loss']:.2%}" if result["loss"] else ""
    lines = [
        f"links: {link} ({result['emulator']}, congestion control {sites}, "
        f"geotrain's own {result['congestion']['geotrain'] or 'unknown'})",
        f"windows {result['windows']}, {result['num_microbatches']} microbatches",
        "",
        _row("geotrain", result["step_s"], _own_remark(result)),
        _row("ideal", result["ideal_s"], "windows that hide the latency"),
        *_measured_row(result["measured"]),
        _row("lower bound", result["lower_bound_s"], "no synchronous step is below"),
    ]
    for name, step_s in result["peer_step_s"].items():
        against = f"{step_s / result['step_s']:.2f} x geotrain's" if step_s is not None else ""
        if name == "torch_csv":
            against += " " + _widths(result["torch_csv_widths"])
        lines.append(_row(name, step_s, against or result["peer_notes"].get(name, "")))
    lines += [f"  {name}: {note}" for name, note in result["peer_notes"].items() if "," in name]
    lines += ["", *phase_lines(result["phases"])] if result["phases"] else []
    lines += ["", f"bubble {result['bubble']:.1%} of the slowest stage's step"]
    lines += [result["peer_reason"]] if result["peer_reason"] else []
    lines.append(f"load {result['load']:.2f} on {result['num_cpus']} CPUs when it began")
    return "\n".join(lines)


def _own_remark(result: Mapping[str, Any]) -> str:
    ratio = f"{result['ratio']:.3f} x ideal" if result["ratio"] is not None else ""
    done, asked = result["num_steps"], result["num_steps_asked"]
    return ratio if done == asked else f"{ratio}, {done} of {asked} steps in time".lstrip(", ")


def _measured_row(measured: Mapping[str, Any] | None) -> list[str]:
    if measured is None:
        return []
    remark = (
        f"with what a microbatch took: {measured['slowest_s'] * 1e3:.1f} ms, not "
        f"{measured['asked_slowest_s'] * 1e3:.1f}; the step is {measured['ratio'] or 0:.3f} x this"
    )
    return [_row("  as measured", measured["ideal_s"], remark)]


def _widths(widths: Mapping[str, float | None]) -> str:
    tried = (f"{width}: {'none' if s is None else f'{s:.3f}'}" for width, s in widths.items())
    return f"(warm-up {', '.join(tried)})"


def _row(name: str, step_s: float | None, remark: str) -> str:
    value = "   none" if step_s is None else f"{step_s:7.3f}"
    return f"{name:<13}{value} s  {remark}".rstrip()
