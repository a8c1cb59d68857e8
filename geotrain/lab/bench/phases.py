"""Steps on links that a script changes: what they took between one change and the next. Pure."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geotrain.control.ideal import ideal_step_s, lower_bound_s
from geotrain.control.journal import Entry
from geotrain.lab.bench.options import BenchOptions
from geotrain.lab.script import parse_script
from geotrain.lab.settings import LinkSettings, describe_settings, directions_of

Step = Mapping[str, Any]
"""A line of the first region's training process: step, step_s, ended_s, windows, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A time in which the links stay as they are."""

    at_s: float
    """When it begins, since the script was started."""
    change: str
    """What begins it; empty for the first."""
    links: Sequence[tuple[LinkSettings, LinkSettings]]
    """Both directions of each boundary."""


def phases_of(options: BenchOptions) -> list[Phase]:
    """The phases of a scripted run, the time before the first change included.

    Raises:
        ConfigError: The script cannot work; says which entry, and what to do.
    """
    assert options.script is not None
    names = list(options.names)
    directions = directions_of(names, "line")
    settings = dict.fromkeys(directions, options.link)
    pairs = list(itertools.pairwise(names))

    def links() -> list[tuple[LinkSettings, LinkSettings]]:
        return [(settings[pair], settings[pair[::-1]]) for pair in pairs]

    found = [Phase(at_s=0.0, change="", links=links())]
    changes = parse_script(options.script.text, file=options.script.file, directions=directions)
    for change in changes:
        for direction in change.selection.pick(directions):
            settings[direction] = settings[direction].changed(change.settings)
        text = f"at {change.at_s:g} s {change.selection}: {describe_settings(change.settings)}"
        text += f" ({change.why})" if change.why else ""
        if found[-1].at_s == change.at_s and found[-1].change:
            text = f"{found.pop().change}; {text}"
        found.append(Phase(at_s=change.at_s, change=text, links=links()))
    return found


def phase_rows(
    options: BenchOptions, steps: Sequence[Step], plans: Sequence[Entry], *, started_s: float
) -> list[dict[str, Any]]:
    """What the JSON says of each phase.

    A step in which the links changed is the first of the new phase, and its time counts for
    neither.

    Args:
        plans: As the first region noted them.
        started_s: When the script was started, on the clock of the steps' `ended_s`.
    """
    phases = phases_of(options)
    borders_s = [started_s + phase.at_s for phase in phases[1:]]
    rows = []
    for index, phase in enumerate(phases):
        begin_s = borders_s[index - 1] if index else float("-inf")
        end_s = borders_s[index] if index < len(borders_s) else float("inf")
        own = [step for step in steps if begin_s < step["ended_s"] <= end_s]
        rows.append(_row(options, phase, own, plans, begin_s))
    return rows


def _row(
    options: BenchOptions,
    phase: Phase,
    steps: Sequence[Step],
    plans: Sequence[Entry],
    begin_s: float,
) -> dict[str, Any]:
    numbers = [step["step"] for step in steps]
    own_plans = [entry for entry in plans if entry.step in numbers and entry.step > 1]
    # The run's first step finds its connections still slow.
    whole = [s for s in steps if s["ended_s"] - s["step_s"] >= begin_s and s["step"] > 1]
    settled_from = own_plans[-1].step if own_plans else 0
    count = steps[-1]["num_microbatches"] if steps else options.work.first_count
    costs = options.costs_with(count, phase.links)
    return {
        "at_s": phase.at_s,
        "change": phase.change,
        "first_step": numbers[0] if numbers else None,
        "num_steps": len(steps),
        "step_s": _median([step["step_s"] for step in whole]),
        "settled_step_s": _median([s["step_s"] for s in whole if s["step"] >= settled_from]),
        "ideal_s": ideal_step_s(costs),
        "lower_bound_s": lower_bound_s(costs),
        "link_s": costs.link_s,
        "windows": steps[-1]["windows"] if steps else None,
        "num_microbatches": count if steps else None,
        "new_plans": [
            plan_row(entry) | {"steps_after_change": entry.step - numbers[0]} for entry in own_plans
        ],
    }


def plan_row(entry: Entry) -> dict[str, Any]:
    """What the JSON says of a plan."""
    return {
        "step": entry.step,
        "windows": list(entry.windows),
        "num_microbatches": entry.num_microbatches,
        "why": entry.why,
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def phase_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For people: a line for each phase, and one for each plan that it brought."""
    lines = []
    for row in rows:
        what = row["change"] or "as the run began"
        if row["step_s"] is None:
            lines.append(f"  {what}: no whole step was left for it; give more --steps")
            continue
        lines.append(
            f"  {what}: step {row['settled_step_s'] or row['step_s']:.3f} s once settled, "
            f"{row['step_s']:.3f} s in all, ideal {max(row['ideal_s'], row['link_s']):.3f} s "
            f"({row['num_steps']} steps from step {row['first_step']})"
        )
        for plan in row["new_plans"]:
            windows = ",".join(map(str, plan["windows"]))
            after = f" ({plan['steps_after_change']} after the change)" if row["change"] else ""
            lines.append(
                f"    from step {plan['step']}{after}: windows {windows}, "
                f"{plan['num_microbatches']} microbatches"
            )
    return lines
