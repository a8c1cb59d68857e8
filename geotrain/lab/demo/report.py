"""What the demo prints: for people, or one JSON object a line."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geotrain.lab.demo.options import Options

_STEP_KEYS = (
    *("event", "step", "loss", "grad_norm", "num_tokens", "step_s"),
    *("num_microbatches", "windows", "wan_bytes"),
)


@dataclass(slots=True, kw_only=True)
class Report:
    """Collects the steps of one run; every method returns the lines to print."""

    options: Options
    steps: list[Mapping[str, Any]] = field(default_factory=list)

    def opening(self, emulator: str = "") -> list[str]:
        """`emulator`: which kind emulates the links, and why not the other."""
        if self.options.json:
            return []
        options = self.options
        regions = f"{options.regions} regions: {', '.join(options.names)}"
        if options.regions == 1:
            return [f"one region: {options.names[0]}, one process, no links"]
        return [
            f"{regions}; each a daemon and a training process of its own on this machine",
            f"links between them: round trip {options.rtt_ms:g} ms, {options.mbit:g} Mbit/s, "
            f"codec {options.codec} (emulated by {emulator})",
        ]

    def step(self, line: Mapping[str, Any]) -> list[str]:
        """One step as the first region's training script told it."""
        self.steps.append(line)
        if self.options.json:
            return [json.dumps({key: line[key] for key in _STEP_KEYS})]
        rate = line["num_tokens"] / line["step_s"]
        number, width = len(self.steps), len(str(self.options.steps))
        return [
            f"step {number:>{width}}/{self.options.steps}  loss {line['loss']:.4f}  "
            f"{line['step_s']:6.3f} s  {rate / 1e3:6.2f} k tokens/s  "
            f"WAN {line['wan_bytes'] / 1e6:7.2f} MB"
        ]

    def summary(
        self,
        *,
        wall_s: float,
        rtt_ms: Mapping[str, Mapping[str, float]],
        verified: bool,
        difference: float | None,
    ) -> list[str]:
        """The end of the run.

        Args:
            wall_s: Seconds since the command began, without the comparison.
            rtt_ms: What the daemons measured, by link.
            verified: Whether the parameters were compared.
            difference: The largest, or None for one that is not a number.
        """
        if not self.options.json:
            return self._prose(wall_s, rtt_ms, verified, difference)
        event: dict[str, Any] = {
            "event": "summary",
            "regions": self.options.regions,
            "steps": len(self.steps),
            "final_loss": self.steps[-1]["loss"],
            "wall_s": round(wall_s, 3),
            "rtt_ms": rtt_ms,
        }
        if verified:
            event["max_abs_param_diff"] = difference
        return [json.dumps(event)]

    def _prose(
        self,
        wall_s: float,
        rtt_ms: Mapping[str, Mapping[str, float]],
        verified: bool,
        difference: float | None,
    ) -> list[str]:
        first, last = self.steps[0]["loss"], self.steps[-1]["loss"]
        # The first step also warms up allocators and links.
        step_s = statistics.median(line["step_s"] for line in self.steps[1:] or self.steps)
        regions = f"{self.options.regions} region" + ("s" if self.options.regions > 1 else "")
        lines = [
            "",
            f"{regions} trained one model: {len(self.steps)} steps in {wall_s:.1f} s, "
            f"loss {first:.3f} -> {last:.3f}, {step_s:.3f} s a step (median)",
        ]
        for link, values in rtt_ms.items():
            measured = ", ".join(f"{name} {value:.1f}" for name, value in values.items())
            lines.append(f"round trip {link}: {measured} ms")
        if self.options.regions > 1 and self.options.rtt_ms > 0:
            lines.append(self._delay_share(step_s))
        if verified:
            same = "bit for bit what one plain torch process computes"
            verdict = same if difference == 0.0 else "NOT what one plain torch process computes"
            lines.append(f"parameters: largest difference {difference}: {verdict}")
        return lines

    def _delay_share(self, step_s: float) -> str:
        delay_s = (self.options.regions - 1) * self.options.rtt_ms / 1e3
        per_microbatch_s = delay_s * self.options.microbatches
        return (
            f"one round trip of every link is {delay_s:.3f} s, {delay_s / step_s:.0%} of a step; "
            f"waiting for it at each microbatch would add {per_microbatch_s:.1f} s"
        )


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
