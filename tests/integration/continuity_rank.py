"""What a region runs in the continuity suite: cases one after another, each with a record.

GEOTRAIN_CONFIG=site.toml python continuity_rank.py REGION FOLDER CASE...
"""

import itertools
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geotrain

WIDTH = 16
BATCH = 24
ENDLESS = 1_000_000
OTHERS_LIMIT_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Case:
    wide: int = WIDTH
    """Features at the boundary of two regions: a microbatch of 8 samples has 32 bytes a feature."""
    steps: int = 6
    random_state: int = 7
    has_optimizer: bool = True
    """Without: a second less to start, for the first one made imports torch's compiler."""
    save_at: tuple[int, ...] = ()
    keep: int | None = None
    resume: str = ""
    """The folder of checkpoints to resume from."""
    acts: tuple[str, str] = ("", "")
    """A region, and what it does after step 3; "be busy" after every third; "linger" at the end."""


CASES = {
    "uninterrupted": Case(),
    "saving": Case(steps=4, save_at=(1, 2, 4), keep=2, acts=("r0", "linger")),
    # Another random state than the run had that saved: only the checkpoint may tell it.
    "resuming": Case(resume="checkpoints", random_state=99),
    "resuming an older step": Case(resume="older", random_state=99),
    "resuming a damaged step": Case(resume="damaged"),
    "stopping": Case(steps=ENDLESS, acts=("r1", "stop")),
    "stopping in a commit": Case(steps=ENDLESS, acts=("r1", "stop in a commit")),
    "large boundary": Case(wide=3 << 15, steps=2),
    "cuts": Case(wide=1 << 13, steps=32),
    "endless": Case(steps=ENDLESS, has_optimizer=False),
    "left by r0": Case(steps=ENDLESS, has_optimizer=False, acts=("r0", "leave")),
    "left by r1": Case(steps=ENDLESS, has_optimizer=False, acts=("r1", "leave")),
    "crash in r1": Case(steps=ENDLESS, acts=("r1", "crash")),
    "busy in r0": Case(steps=ENDLESS, has_optimizer=False, acts=("r0", "be busy")),
}


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dropout(self.linear(x)))


class Average:
    """A moving average of the weights, as an on_commit hook with state."""

    def __init__(self, segment: nn.Module) -> None:
        self.segment = segment
        self.num_steps = 0
        self.weights = {n: torch.zeros_like(p) for n, p in segment.named_parameters()}

    def __call__(self, result: geotrain.StepResult) -> None:
        self.num_steps += 1
        for name, parameter in self.segment.named_parameters():
            self.weights[name].lerp_(parameter.detach(), 0.3)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps, self.weights = state["num_steps"], state["weights"]


def make_loader(case: Case) -> Iterable[Any]:
    """Shuffles by torch's global random state; has no state_dict."""
    rng = torch.Generator().manual_seed(5)
    num_samples = 8 * BATCH
    samples, targets = (torch.randn(num_samples, WIDTH, generator=rng) for _ in range(2))
    if case.steps > 8:
        return itertools.cycle([(samples[:BATCH], targets[:BATCH])])
    return DataLoader(TensorDataset(samples, targets), batch_size=BATCH, shuffle=True)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().sum()


class Trial:
    """One case in this region."""

    def __init__(self, region: geotrain.Region, name: str, folder: Path) -> None:
        self.region, self.name, self.folder = region, name, folder
        self.case = case = CASES[name]
        torch.manual_seed(case.random_state)
        widths = [WIDTH, WIDTH, case.wide, WIDTH, WIDTH]
        self.segment = region.segment(
            lambda: nn.Sequential(*(Layer(*pair) for pair in itertools.pairwise(widths)))
        )
        region.init_weights(self.segment)
        self.average = Average(self.segment)
        region.on_commit(self.average)

    def run(self) -> dict[str, Any]:
        """Train to the end or the error. Returns what came of it."""
        record: dict[str, Any] = {"error": None, "resumed": None, "steps": []}
        try:
            self.train(record)
        except geotrain.RegionError as error:
            record |= {"error": error.to_record(), "text": str(error)}
        record |= {
            "ended_at": time.time(),
            "parameters": self.segment.state_dict(),
            "average": self.average.state_dict(),
        }
        return record

    def train(self, record: dict[str, Any]) -> None:
        case = self.case
        optimizer: Any = None
        scheduler: Any = None
        if case.has_optimizer:
            optimizer = torch.optim.AdamW(self.segment.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        pipeline = self.region.pipeline(
            self.segment,
            optimizer,
            loss_fn=loss,
            loss_reduction="sum",
            scheduler=scheduler,
            max_grad_norm=1.0,
        )
        act = case.acts[1] if self.region.name == case.acts[0] else ""
        if act == "stop in a commit":  # as a signal handler may
            optimizer.register_step_post_hook(
                lambda *_: pipeline.step_count == 2 and pipeline.request_stop("interrupted")
            )
        loader = make_loader(case) if self.region.reads_data else None
        if case.resume:
            record["resumed"] = pipeline.resume(self.folder / case.resume, loader=loader)
        for result in pipeline.fit(loader, steps=case.steps):
            record["steps"].append(result.step)
            print(f"{self.name}: step {result.step} done", flush=True)
            if result.step in case.save_at:
                pipeline.save(self.folder / "checkpoints", keep=case.keep)
            if act == "be busy" and result.step % 3 == 0:
                await_files([self.folder / f"go on after {result.step}"])
            if act == "stop" and result.step == 3:
                pipeline.request_stop("the loss is low enough")
            if act == "crash" and result.step == 3:
                raise ArithmeticError("the tracker gave up")
            if act == "leave" and result.step == 3:
                break
        record["stop_reason"] = pipeline.stop_reason
        if act == "linger":
            await_files([self.folder / f"go on after {case.steps}"])


def write(folder: Path, region: str, name: str, record: dict[str, Any]) -> None:
    draft = folder / f"{region}.{name}.draft"
    torch.save(record, draft)
    draft.rename(folder / f"{region}.{name}.pt")


def await_files(paths: list[Path]) -> None:
    deadline = time.monotonic() + OTHERS_LIMIT_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"not there in time: {paths}"
        time.sleep(0.01)


def main() -> None:
    folder = Path(sys.argv[2])
    for name in sys.argv[3:]:
        region = geotrain.attach()
        record = Trial(region, name, folder).run()
        region.close()
        write(folder, region.name, name, record)
        if name != sys.argv[-1] and "linger" not in CASES[name].acts:
            await_files([folder / f"{one}.{name}.pt" for one in region.region_names])


if __name__ == "__main__":
    main()
