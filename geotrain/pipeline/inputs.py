"""What the first region feeds its stage: a copy of each microbatch, the next one made ahead."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from geotrain.pipeline.tree import map_tensors
from geotrain.pipeline.worker import Worker

Microbatch = tuple[Any, Any]
"""(inputs, targets), each a tensor or a tree of tensors."""


class Inputs:
    """The microbatches of one batch, in order.

    A segment may change its input in place, so it gets a copy; the batch stays as the user gave it.
    """

    def __init__(self, *, worker: Worker, device: torch.device) -> None:
        self._worker = worker
        self._device = device
        self._microbatches: Sequence[Microbatch] = ()
        self._ahead: tuple[int, Future[Microbatch]] | None = None

    def start(self, microbatches: Sequence[Microbatch]) -> None:
        """Take up a batch, cut into views."""
        self._microbatches = microbatches
        self._ahead = None

    def take(self, microbatch: int) -> Microbatch:
        """A copy of this microbatch on the device; begins with the next one."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == microbatch and not ahead[1].cancel():
            copy = ahead[1].result()
        else:
            copy = _copy(self._microbatches[microbatch], self._device)
        following = microbatch + 1
        # On a GPU the copy belongs into the order of the training thread's own stream.
        if following < len(self._microbatches) and self._device.type == "cpu":
            call = partial(_copy, self._microbatches[following], self._device)
            self._ahead = (following, self._worker.submit(call))
        return copy


def _copy(microbatch: Microbatch, device: torch.device) -> Microbatch:
    copies: Microbatch = map_tensors(microbatch, lambda tensor: tensor.to(device, copy=True))
    return copies
