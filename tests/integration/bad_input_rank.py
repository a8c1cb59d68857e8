"""What a region runs in the bad-input suite: one mistake after another, and the error of each.

GEOTRAIN_CONFIG=site.toml python bad_input_rank.py REGION OUT_FOLDER CASE...
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import geotrain

WIDTH = 8
NUM_REGIONS = 2
CASE_LIMIT_S = 40.0
Batch = tuple[torch.Tensor, torch.Tensor]


class Odd(nn.Linear):
    """A layer whose output changes with the number of its call."""

    def __init__(self, change: Callable[[torch.Tensor, int], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change = change
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.change(super().forward(x), self.calls)


def fails(x: torch.Tensor, call: int) -> torch.Tensor:
    if call == 5:  # the second microbatch of the second step, with three in a step
        raise ArithmeticError("the third layer gave up")
    return x


CHANGES: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "another tree": lambda x, call: x if call <= 3 else (x, None),
    "another dtype": lambda x, call: x if call <= 3 else x.double(),
    "a shape that does not fit": lambda x, call: x if call <= 3 else x[:, :5],
}


def batches(case: str) -> Iterator[Batch]:
    for step in range(3):
        empty = case == "a batch of no samples" and step == 1
        size = 0 if empty else 9
        yield torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().sum()


def build(region: geotrain.Region, case: str) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    if case in CHANGES:
        layers[1] = Odd(CHANGES[case])
    if case == "an exception in a model":
        layers[2] = Odd(fails)
    if case == "different models" and region.index == 1:
        layers[0] = nn.Linear(WIDTH, WIDTH, bias=False)
    return nn.Sequential(*layers)


def count(case: str, region: geotrain.Region) -> Callable[[Any], float]:
    per_target = 2.0 if case == "another count of targets" and region.index == 1 else 1.0
    return lambda targets: per_target * targets.numel()


def run(region: geotrain.Region, case: str) -> None:
    segment = region.segment(lambda: build(region, case))
    region.init_weights(segment)
    pipeline = region.pipeline(
        segment,
        torch.optim.SGD(segment.parameters(), lr=0.01),
        loss_fn=loss,
        loss_reduction="sum",
        num_targets=count(case, region),
    )
    if case == "a loader where none is read" or region.reads_data:
        loader = batches(case)
    else:
        loader = None
    if case == "step here and evaluate there" and region.index == 1:
        pipeline.step(None)
        pipeline.evaluate(None)
    else:
        for _ in pipeline.fit(loader, steps=3):
            pass


def error_of(case: str) -> dict[str, Any]:
    """What came of a case; empty where nothing did."""
    region = geotrain.attach()
    try:
        run(region, case)
    except geotrain.RegionError as error:
        return error.to_record() | {"text": str(error)}
    finally:
        region.close()
    return {}


def await_both(folder: Path, case: str) -> None:
    """Until both regions are done with a case: the next one would meet the wrong partner."""
    deadline = time.monotonic() + CASE_LIMIT_S
    while len(list(folder.glob(f"*.{case}.json"))) < NUM_REGIONS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other region did not end {case!r} in {CASE_LIMIT_S:.0f} s")
        time.sleep(0.005)


def main() -> None:
    name, folder, *cases = sys.argv[1:]
    for case in cases:
        record = error_of(case)
        draft = Path(folder, f"{name}.{case}.draft")
        draft.write_text(json.dumps(record))
        draft.rename(Path(folder, f"{name}.{case}.json"))
        await_both(Path(folder), case)


if __name__ == "__main__":
    main()
