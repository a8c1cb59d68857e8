"""Where in the run and in the data a region is."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch


class Position:
    """The step counter and, in the region that reads the data, the place in the loader.

    A loader with `state_dict` is restored by it. Any other is started again as it was started
    before, with the random state it had then, and the batches it already gave are skipped.
    """

    def __init__(self) -> None:
        self.step = 0
        self.samples = 0
        """Samples consumed by all steps, skipped ones included."""
        self.skipped_steps = 0
        self.batches = 0
        """Batches taken from the loader since it was started."""
        self._loader: Any = None
        self._started_with: list[torch.Tensor] = []
        self._to_skip = 0

    def advance(self, *, samples: int, committed: bool) -> None:
        """A step is done; a skipped one consumes its samples too."""
        self.step += 1
        self.samples += samples
        self.skipped_steps += not committed

    def start(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader, from where a checkpoint left it if there was one."""
        self._loader = loader
        generators = _generators(loader)
        now = [generator.get_state() for generator in generators]
        to_skip, self._to_skip = self._to_skip, 0
        if to_skip and len(self._started_with) == len(generators):
            for generator, state in zip(generators, self._started_with, strict=True):
                generator.set_state(state)
        self._started_with = [generator.get_state() for generator in generators]
        batches = iter(loader)
        self.batches = 0
        for _ in range(to_skip):
            next(batches, None)
            self.batches += 1
        if to_skip:
            generators[0].set_state(now[0])
        return self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.batches += 1
            yield batch

    # ---- checkpoints

    def counters(self) -> dict[str, int]:
        return {
            "step": self.step,
            "samples": self.samples,
            "skipped_steps": self.skipped_steps,
            "batches": self.batches,
        }

    def loader_state(self) -> dict[str, Any] | None:
        """The loader's own state, where it keeps one."""
        if hasattr(self._loader, "state_dict"):
            state: dict[str, Any] = self._loader.state_dict()
            return state
        return None

    def started_with(self) -> list[torch.Tensor]:
        """Random states that the loader was started with."""
        return self._started_with

    def restore(
        self,
        counters: dict[str, int],
        *,
        loader: Any,
        loader_state: dict[str, Any] | None,
        started_with: list[torch.Tensor],
    ) -> None:
        """Go back to a checkpoint; takes effect on the loader when `start` is called."""
        self.step = counters["step"]
        self.samples = counters["samples"]
        self.skipped_steps = counters["skipped_steps"]
        self.batches = counters["batches"]
        self._started_with = started_with
        if loader_state is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(loader_state)
            self._to_skip = 0
        else:
            self._to_skip = self.batches


def _generators(loader: Any) -> list[torch.Generator]:
    """Torch's global generator and those of the loader's own that its order may depend on."""
    found = [torch.default_generator]
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found
