"""The lines that the demo prints: for people, or one JSON object each. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geotrain.control.attribution import in_words
from geotrain.lab.demo.changes import Change
from geotrain.lab.demo.comparison import Comparison
from geotrain.lab.demo.state import RunState

_STEP_KEYS = (
    *("event", "step", "loss", "grad_norm", "num_tokens", "step_s"),
    *("num_microbatches", "windows", "wan_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Every method returns the lines to print."""

    state: RunState
    num_cpus: int
    """Of this machine, which all regions share."""

    def opening(self) -> list[str]:
        options = self.state.options
        if options.json:
            return []
        regions = f"{options.regions} regions: {', '.join(options.names)}"
        if options.regions == 1:
            return [f"one region: {options.names[0]}, one process, no links"]
        return [
            f"{regions}; each a daemon and a training process of its own on this machine",
            f"links between them: round trip {options.rtt_ms:g} ms, {options.mbit:g} Mbit/s, "
            f"codec {options.codec} (emulated by {self.state.emulator})",
        ]

    def starting(self) -> list[str]:
        """The first step may be long in coming."""
        options = self.state.options
        if options.json:
            return []
        if options.regions == 1:
            return ["starting a training process, which imports torch ..."]
        count = options.regions
        return [f"starting {count} daemons and {count} training processes, which import torch ..."]

    def step(self, line: Mapping[str, Any]) -> list[str]:
        """One step as the first region's training script told it, which the state has already."""
        options = self.state.options
        if options.json:
            return [json.dumps({key: line[key] for key in _STEP_KEYS})]
        rate = line["num_tokens"] / line["step_s"]
        number, width = len(self.state.losses), len(str(options.steps))
        return [
            f"step {number:>{width}}/{options.steps}  loss {line['loss']:.4f}  "
            f"{line['step_s']:6.3f} s  {rate / 1e3:6.2f} k tokens/s  "
            f"WAN {line['wan_bytes'] / 1e6:7.2f} MB"
        ]

    def change(self, change: Change) -> list[str]:
        """Something that changed, and why; programs get steps alone."""
        if self.state.options.json:
            return []
        return [f"at {self.state.since_first_step(change):.1f} s  {change}"]

    def baseline_begins(self, num_steps: int) -> list[str]:
        """The regions have ended, and one plain process runs instead."""
        if self.state.options.json:
            return []
        return ["", f"now {num_steps} steps in one plain torch process, alone, to compare with"]

    def summary(
        self,
        comparison: Comparison,
        *,
        wall_s: float,
        rtt_ms: Mapping[str, Mapping[str, float]],
        difference: float | None,
    ) -> list[str]:
        """The end of the run.

        Args:
            wall_s: Seconds since the command began, without the plain process at the end.
            rtt_ms: What the daemons measured, by link.
            difference: Of the parameters, the largest, where they were to be compared; None for
                one that is not a number.
        """
        options = self.state.options
        if not options.json:
            return self._prose(comparison, wall_s, rtt_ms, difference)
        event: dict[str, Any] = {
            "event": "summary",
            "regions": options.regions,
            "steps": len(self.state.losses),
            "final_loss": self.state.losses[-1],
            "wall_s": round(wall_s, 3),
            "rtt_ms": rtt_ms,
            "step_s": comparison.step_s,
            "ideal_s": comparison.ideal_s,
            "lower_bound_s": comparison.lower_bound_s,
            "single_process_step_s": comparison.single_process_step_s,
            "attribution_s": {region.name: region.spent_s for region in self.state.regions},
        }
        if options.verify:
            event["max_abs_param_diff"] = difference
        return [json.dumps(event)]

    def _prose(
        self,
        comparison: Comparison,
        wall_s: float,
        rtt_ms: Mapping[str, Mapping[str, float]],
        difference: float | None,
    ) -> list[str]:
        options, losses = self.state.options, self.state.losses
        regions = f"{options.regions} region" + ("s" if options.regions > 1 else "")
        lines = [
            "",
            f"{regions} trained one model: {len(losses)} steps in {wall_s:.1f} s, "
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}",
        ]
        for link, values in rtt_ms.items():
            measured = ", ".join(f"{name} {value:.1f}" for name, value in values.items())
            lines.append(f"round trip {link}: {measured} ms")
        if options.regions > 1 and options.rtt_ms > 0:
            lines += self._delay_share(comparison.step_s)
        lines += ["", *self._table(comparison), "", *self._remarks(comparison), *self._spent()]
        if options.verify:
            same = "bit for bit what one plain torch process computes"
            verdict = same if difference == 0.0 else "NOT what one plain torch process computes"
            lines.append(f"parameters: largest difference {difference}: {verdict}")
        return lines

    def _delay_share(self, step_s: float) -> list[str]:
        options = self.state.options
        delay_s = (options.regions - 1) * options.rtt_ms / 1e3
        per_microbatch_s = delay_s * options.microbatches
        return [
            f"one round trip of every link is {delay_s:.3f} s, {delay_s / step_s:.0%} of a step;",
            f"by calculation, waiting for it at each microbatch would add {per_microbatch_s:.1f} s",
        ]

    def _table(self, comparison: Comparison) -> list[str]:
        step_s = comparison.step_s
        rows = [
            ("measured", step_s, "median after the first step"),
            ("T_ideal", comparison.ideal_s, "each link's delay paid once a step"),
            ("lower bound", comparison.lower_bound_s, "no synchronous step is below"),
            ("one process", comparison.single_process_step_s, "plain torch, alone, one thread"),
        ]
        lines = ["seconds a step"]
        for name, value, remark in rows:
            figure = "      -" if value is None else f"{value:7.3f}"
            against = f"measured is {step_s / value:.2f} x" if value else ""
            against = "" if name == "measured" else against
            lines.append(f"  {name:<12}{figure}  {remark:<34}  {against}".rstrip())
        return lines

    def _spent(self) -> list[str]:
        """Where the regions' steps went, all but the first."""
        width = max(map(len, self.state.options.names))
        rows = [
            f"  {region.name:<{width}}  {in_words(region.spent_s, most=4)}"
            for region in self.state.regions
            if region.spent_s
        ]
        return ["", "where the time of a step went", *rows] if rows else []

    def _remarks(self, comparison: Comparison) -> list[str]:
        cpus = f"{self.num_cpus} CPU{'s' if self.num_cpus > 1 else ''}"
        lines = []
        if comparison.costs is not None:
            lines += [
                "T_ideal and the bound: with the forwards and backwards as they took in this run,",
                f"in which all regions shared this machine's {cpus}",
            ]
        if comparison.link_is_slower:
            lines += [
                "a tensor takes longer to send than a microbatch to compute: the link sets the",
                "pace, and T_ideal is out of reach",
            ]
        if self.state.options.script is not None:
            lines += [
                "the script changed the links: T_ideal is for the shortest round trip seen and",
                "the rate at the start",
            ]
        return lines


def rtt_of_links(
    names: Sequence[str], statuses: Sequence[Mapping[str, Any] | None]
) -> dict[str, dict[str, float]]:
    """Round trips in ms out of the daemons' status pages: of each link, as its dialler saw it."""
    found = {}
    for index, status in enumerate(statuses[:-1]):
        link = (status or {}).get("links", {}).get(names[index + 1], {})
        rtt_s = link.get("rtt_s") or {}
        values = {
            name: round(rtt_s[name] * 1e3, 2)
            for name in ("min", "p50", "p99")
            if isinstance(rtt_s.get(name), int | float)
        }
        found[f"{names[index]}-{names[index + 1]}"] = values
    return found
