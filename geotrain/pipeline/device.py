"""Where this rank computes."""

import os

import torch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Values of run.precision and the dtype of a segment's floating-point parameters."""


def choose_device() -> torch.device:
    """The GPU of this local rank where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed what a layer on `device` draws from: that device's generator, and the CPU's.

    torch.manual_seed reaches for every kind of device there is, and for each that was never used it
    formats the whole Python stack: milliseconds, where a small layer takes less than one.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
