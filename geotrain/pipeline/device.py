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
