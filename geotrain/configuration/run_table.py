"""`[run]`: what must be the same in every region."""

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)

from geotrain.configuration.problems import Finding, refuse
from geotrain.configuration.rules import (
    check_microbatches,
    check_window,
    region_findings,
    split_layers,
)
from geotrain.configuration.table import Name, Table

Codec = Literal["none", "planes"]


class RegionSpec(Table):
    name: Name
    """Letters, digits, "-" and "_", at most 63, starting with a letter or digit."""
    layers: str = Field(pattern=r"^[0-9]{1,6}:[0-9]{1,6}$")
    """The layers this region owns, half-open, such as "0:6"."""

    @property
    def first(self) -> int:
        return split_layers(self.layers)[0]

    @property
    def last(self) -> int:
        """One past the region's final layer."""
        return split_layers(self.layers)[1]


class PlanConfig(Table):
    microbatches: Annotated[Literal["auto"] | int, BeforeValidator(check_microbatches)] = 8
    """Into how many parts a global batch is cut; 8 keeps two to four regions busy. "auto" (with
    window = "auto") follows what a microbatch costs; another number gives other rounding."""
    window: Annotated[
        Literal["auto", "classic"] | int | list[int], BeforeValidator(check_window)
    ] = "classic"
    """Microbatches in flight: "auto" (follows stages and links as they show themselves),
    "classic" (regions - index), one number, or one a region."""

    replay: str | None = Field(default=None, min_length=1)
    """Repeat the plans of an earlier run, from the file that its site.plan_log named; relative to
    the first region's site file, and read there alone."""


class CompressionConfig(Table):
    activations: Codec = "none"
    """How forward tensors travel: "none", or "planes" (lossless; smaller, costs a core)."""
    gradients: Codec = "none"
    """How backward tensors travel: "none" or "planes"."""


class RunConfig(Table):
    """What must be the same in every region."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """The run's name: letters, digits, ".", "-" and "_", at most 63."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds weights and dropout."""
    steps: int | None = Field(default=None, ge=1, lt=2**63)
    """Optimizer steps after which the run ends; without it the script says."""
    regions: list[RegionSpec] = Field(min_length=1, max_length=64)
    """The regions in order along the model, each [[run.regions]] with name and layers."""
    global_batch: int = Field(ge=1, lt=2**31)
    """Samples in one optimizer step, over all microbatches."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """What the segments compute in: "fp32" or "bf16"."""
    threads: int = Field(default=1, ge=1, le=1024)
    """torch's CPU threads; another number gives other rounding, so it is part of the run."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clip the global gradient norm to this; without it nothing is clipped."""
    plan: PlanConfig = PlanConfig()
    """How a step is cut and how far stages run ahead."""
    compression: CompressionConfig = CompressionConfig()
    """How tensors are coded on the links."""

    @field_validator("regions")
    @classmethod
    def _check_regions(cls, regions: list[RegionSpec]) -> list[RegionSpec]:
        findings = list(region_findings([(region.name, region.layers) for region in regions]))
        if findings:
            refuse(findings)
        return regions

    @field_validator("plan")
    @classmethod
    def _check_plan(cls, plan: PlanConfig, info: ValidationInfo) -> PlanConfig:
        findings = []
        regions, batch = info.data.get("regions"), info.data.get("global_batch")
        if isinstance(plan.window, list) and regions and len(plan.window) != len(regions):
            allowed = f"must have one entry for each region: {len(regions)}, not {len(plan.window)}"
            findings.append(Finding(key="window", value=plan.window, allowed=allowed))
        if plan.microbatches == "auto":
            if plan.window != "auto":
                allowed = 'can be "auto" only with window = "auto"; give a number'
                findings.append(Finding(key="microbatches", value="auto", allowed=allowed))
        elif batch is not None and plan.microbatches > batch:
            allowed = f"must not exceed global_batch = {batch}; a microbatch needs a sample"
            findings.append(Finding(key="microbatches", value=plan.microbatches, allowed=allowed))
        if findings:
            refuse(findings)
        return plan

    @property
    def num_regions(self) -> int:
        return len(self.regions)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of the canonical form; equal in two regions exactly when `[run]` is."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def canonical(self) -> dict[str, Any]:
        """Plain JSON-able values with every default resolved; what regions compare."""
        return self.model_dump(mode="json")

    def index_of(self, name: str) -> int:
        """The region's place in the line; ValueError for a region that is not in the run."""
        return [region.name for region in self.regions].index(name)
