"""Whether there is memory for a step, before it runs."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import optim

from geotrain.pipeline.context import Context
from geotrain.pipeline.forecast import (
    Forecast,
    gradient_bytes,
    optimizer_bytes,
    size_text,
    state_bytes,
    tensor_bytes,
)
from geotrain.pipeline.memory import ActivationMeter, spare_bytes
from geotrain.pipeline.opening import Opening
from geotrain.pipeline.stage import Stage

logger = logging.getLogger(__name__)

_MEASURED_STEPS = 20
"""From the start, in which what a microbatch keeps is measured."""


class Room:
    """Forecasts what this region's stage needs, and refuses what it has no memory for."""

    def __init__(
        self, context: Context, stage: Stage, optimizers: Sequence[optim.Optimizer]
    ) -> None:
        segment = context.parts.segment
        self._context = context
        self._stage = stage
        self._optimizers = optimizers
        self._parameters = list(segment.parameters())
        self._buffers = list(segment.buffers())
        self._is_followed = stage.meter is not None
        """Automatic windows follow what is measured, and keep to the memory there is."""
        self._meter = stage.meter or ActivationMeter(
            [*self._parameters, *self._buffers], device=context.place.device
        )
        stage.meter = self._meter
        self._num_steps = 0
        self._forecast: Forecast | None = None

    @property
    def terms(self) -> Mapping[str, int]:
        """The last forecast, by the names of its terms."""
        return self._forecast.terms if self._forecast is not None else {}

    def check(self, opening: Opening) -> None:
        """Forecast a step that is about to run.

        Raises:
            RegionError: It would take more than there is.
        """
        before, forecast = self._forecast, self._expect(opening)
        self._forecast = forecast
        self._num_steps += 1
        if self._num_steps > _MEASURED_STEPS and not self._is_followed:
            self._stage.meter = None
        if forecast == before:
            return
        device_bytes = self._device_bytes()
        if device_bytes is None:
            return
        judged = replace(forecast, activations=0) if self._is_followed else forecast
        if before is None or judged.total > before.total:
            refusal = judged.refusal(device_bytes)
            if refusal:
                raise self._context.error("memory", refusal)
        if self._num_steps == 2:  # the first that rests on what was measured
            logger.info("memory: %s; of %s", forecast, size_text(device_bytes))

    def _expect(self, opening: Opening) -> Forecast:
        place = self._context.place
        return Forecast(
            parameters=tensor_bytes([*self._parameters, *self._buffers]),
            gradients=gradient_bytes(self._parameters),
            optimizer=optimizer_bytes(self._optimizers) or 0,
            activations=self._meter.largest_bytes,
            in_flight=min(opening.work.window, max(1, opening.work.num_microbatches)),
            arena=place.arena_bytes if place.device.type == "cpu" else 0,
        )

    def _device_bytes(self) -> int | None:
        """What this process has and could still take; None where the system does not say."""
        place = self._context.place
        spare = spare_bytes(place.device)
        if spare is None:
            return None
        held = tensor_bytes([*self._parameters, *self._buffers]) + state_bytes(self._optimizers)
        return spare + held + (place.arena_bytes if place.device.type == "cpu" else 0)
