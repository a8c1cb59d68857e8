"""What the rank reported of its steps: where their time went, and what is off."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from geotrain.control.attribution import CAUSES

_MAX_REGIONS = 64
_MAX_VERDICTS = 32
_MAX_CHARS = 400


class Reports:
    """Adds up what came; whatever a rank sends, what this says stays small and made of numbers."""

    def __init__(self) -> None:
        self.num_tokens = 0.0
        """Targets of all steps that were reported."""
        self._spent_s: dict[str, float] = {cause: 0.0 for cause in CAUSES}
        self._regions: dict[str, dict[str, float]] = {}
        self._verdicts: list[dict[str, str]] = []

    def on_report(self, report: Mapping[str, Any]) -> None:
        """One step."""
        num_tokens = report.get("num_tokens")
        # A weight of targets, so a float.
        if isinstance(num_tokens, int | float) and 0 <= num_tokens < math.inf:
            self.num_tokens += num_tokens
        for cause, seconds in _spent(report.get("attribution_s")).items():
            self._spent_s[cause] += seconds
        regions = report.get("regions_s")
        if isinstance(regions, Mapping):
            names = list(regions)[:_MAX_REGIONS]
            self._regions = {str(name)[:64]: _spent(regions[name]) for name in names}
        verdicts = report.get("verdicts")
        if isinstance(verdicts, Sequence):
            self._verdicts = [_verdict(each) for each in verdicts[:_MAX_VERDICTS]]

    def summary(self) -> dict[str, Any]:
        """For the status document; seconds by cause."""
        return {
            "total_s": {cause: round(seconds, 6) for cause, seconds in self._spent_s.items()},
            "regions_s": self._regions,
            "verdicts": self._verdicts,
        }


def _spent(told: object) -> dict[str, float]:
    """The causes that are known, with times that are some."""
    if not isinstance(told, Mapping):
        return {}
    found = {str(cause): told.get(cause) for cause in CAUSES}
    return {
        cause: float(seconds)
        for cause, seconds in found.items()
        if isinstance(seconds, int | float) and 0 <= seconds < math.inf
    }


def _verdict(told: object) -> dict[str, str]:
    record = told if isinstance(told, Mapping) else {}
    return {name: str(record.get(name, ""))[:_MAX_CHARS] for name in ("kind", "where", "text")}
