"""The demo's model over two regions without delay, against the same split on torch pipelining.

    python -m tests.benchmarks.real_model [--rounds 3] [--steps 25] [--codec none]

Both compute the same: 3 + 3 layers, 8 microbatches, AdamW, gradients clipped by their global norm,
one thread a rank, over loopback: here two daemons carry the tensors, there gloo does (1F1B, in fp32
as well). They take turns. Prints one JSON object: the median step of each and their ratio, and the
CPU seconds a step of all processes. Linux.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from geotrain.lab.demo import plain
from geotrain.lab.demo import train as demo_train
from tests.integration.harness import Process, Regions, RunSpec, start_process

LAYERS = 6
BATCH = 32
MICROBATCHES = 8
SEED = 0
COUNTED_FROM = 6
"""Windows are chosen, allocators and caches warm."""
LIMIT_S = 120.0


class Stage(nn.Module):
    """Half of the demo's model, under the whole one's names."""

    def __init__(self, whole: plain.ByteTransformer, index: int) -> None:
        super().__init__()
        half = LAYERS // 2
        self.layers = nn.ModuleDict(
            {str(n): whole.layers[n] for n in range(index * half, (index + 1) * half)}
        )
        if index == 0:
            self.tok_embeddings = whole.tok_embeddings
        else:
            self.norm, self.output = whole.norm, whole.output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "tok_embeddings"):
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if hasattr(self, "output") else x


def clip(parameters: Sequence[torch.Tensor]) -> None:
    """As clip_grad_norm_ does for the whole model, over both stages."""
    norms = torch.stack([p.grad.norm() for p in parameters if p.grad is not None])
    total = norms.square().sum()
    dist.all_reduce(total)
    scale = float((plain.MAX_GRAD_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


def torch_rank(rank: int, store: str, steps: int) -> None:
    """What a user of torch.distributed.pipelining writes; a line of JSON for each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    config = plain.ByteConfig(num_layers=LAYERS)
    whole = plain.ByteTransformer(config)
    plain.init_weights(whole, SEED)
    module = Stage(whole, rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    losses: list[torch.Tensor] = []
    schedule = Schedule1F1B(
        stage,
        n_microbatches=MICROBATCHES,
        loss_fn=lambda logits, targets: plain.loss_sum(logits, targets) / num_targets,
        scale_grads=False,
    )
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=plain.LEARNING_RATE, weight_decay=plain.WEIGHT_DECAY
    )
    num_targets = BATCH * config.context
    began = time.perf_counter()
    for step, (inputs, targets) in enumerate(
        plain.batches(seed=SEED, steps=steps, batch=BATCH, context=config.context), start=1
    ):
        losses.clear()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        clip(parameters)
        optimizer.step()
        step_s, began = time.perf_counter() - began, time.perf_counter()
        loss = float(torch.stack(losses).sum()) if losses else None
        print(json.dumps({"step": step, "step_s": step_s, "loss": loss}), flush=True)
    dist.destroy_process_group()


def lines_of(process: Process) -> list[dict[str, Any]]:
    """What the process has printed so far, whole lines of JSON only."""
    text, _, _ = process.output().rpartition("\n")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def await_step(rank: Process, number: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any(line["step"] >= number for line in lines_of(rank)[-1:]):
        assert rank.popen.poll() is None or lines_of(rank), rank.tail()
        assert time.monotonic() < deadline, rank.tail()
        time.sleep(0.02)


def cpu_s(processes: Sequence[Process]) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def watch(ranks: Sequence[Process], others: Sequence[Process], steps: int) -> dict[str, Any]:
    """The steps of the run from COUNTED_FROM on."""
    everyone = [*ranks, *others]
    await_step(ranks[0], COUNTED_FROM)
    before, first = cpu_s(everyone), lines_of(ranks[0])[-1]["step"]
    # One step more runs than is counted, so that every process is there at the last.
    await_step(ranks[0], steps - 1)
    after, last = cpu_s(everyone), lines_of(ranks[0])[-1]["step"]
    deadline = time.monotonic() + LIMIT_S
    for rank in ranks:
        assert rank.wait(deadline=deadline) == 0, rank.tail()
    lines = lines_of(ranks[0])
    found = [line["step_s"] for line in lines if COUNTED_FROM < line["step"] < steps]
    losses = [line["loss"] for rank in ranks for line in lines_of(rank) if line["step"] == steps]
    return {
        "step_s": statistics.median(found),
        "cpu_s": (after - before) / (last - first),
        "loss": max(loss for loss in losses if loss is not None),
    }


def run_geotrain(folder: Path, *, steps: int, codec: str) -> dict[str, Any]:
    spec = RunSpec(
        layers=LAYERS,
        microbatches=MICROBATCHES,
        global_batch=BATCH,
        codec=codec,
        window="auto",
        seed=SEED,
        arena_mib=64,
    )
    arguments = ["--steps", str(steps), "--seed", str(SEED), "--batch", str(BATCH), "--json"]
    with Regions(folder, spec) as regions:
        for name in spec.names:
            regions.start_rank(name, Path(demo_train.__file__), *arguments)
        regions.start_daemons()
        ranks, daemons = list(regions.ranks.values()), list(regions.daemons.values())
        return watch(ranks, daemons, steps)


def run_torch(folder: Path, *, steps: int) -> dict[str, Any]:
    folder.mkdir()
    ranks: list[Process] = []
    try:
        for rank in range(2):
            command = [sys.executable, "-m", "tests.benchmarks.real_model", "--rank", str(rank)]
            command += ["--store", f"file://{folder / 'store'}", "--steps", str(steps)]
            name = f"rank {rank}"
            ranks.append(start_process(command, name=name, log=folder / f"{rank}.log"))
        return watch(ranks, [], steps)
    finally:
        for process in ranks:
            process.stop()


def median_of(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in found), 4) for name in found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--codec", choices=("none", "planes"), default="none")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        torch_rank(given.rank, given.store, given.steps)
        return 0
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        for number in range(given.rounds):
            folder = Path(name)
            ours.append(run_geotrain(folder / f"{number}", steps=given.steps, codec=given.codec))
            theirs.append(run_torch(folder / f"{number}.torch", steps=given.steps))
    result = {
        "benchmark": "real_model",
        "codec": given.codec,
        "geotrain": median_of(ours),
        "torch_1f1b": median_of(theirs),
        "ratio": round(median_of(ours)["step_s"] / median_of(theirs)["step_s"], 4),
        "ratios": [round(a["step_s"] / b["step_s"], 4) for a, b in zip(ours, theirs, strict=True)],
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
