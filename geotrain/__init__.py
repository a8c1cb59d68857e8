"""geotrain: train one model over GPUs in several regions, clouds or companies."""

from typing import TYPE_CHECKING, Any

from geotrain.errors import AttachError, ConfigError, GeotrainError, RegionError
from geotrain.version import __version__

if TYPE_CHECKING:
    from geotrain.pipeline.result import EvalReport, StepResult
    from geotrain.pipeline.segment import Split
    from geotrain.pipeline.step import Pipeline
    from geotrain.region import Region, attach

__all__ = [
    "AttachError",
    "ConfigError",
    "EvalReport",
    "GeotrainError",
    "Pipeline",
    "Region",
    "RegionError",
    "Split",
    "StepResult",
    "__version__",
    "attach",
]

_HOMES = {
    "EvalReport": "geotrain.pipeline.result",
    "Pipeline": "geotrain.pipeline.step",
    "Region": "geotrain.region",
    "Split": "geotrain.pipeline.segment",
    "StepResult": "geotrain.pipeline.result",
    "attach": "geotrain.region",
}


def __getattr__(name: str) -> Any:
    # The daemon is part of this package and must start without torch, so what needs torch is
    # imported when it is first asked for.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'geotrain' has no attribute {name!r}")
