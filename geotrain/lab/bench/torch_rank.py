"""One rank of the same work on torch.distributed.pipelining over gloo.

Runs the variants it is given one after another; the first stage prints a line for each step.
"""

import csv
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from geotrain.lab.bench.options import Work
from geotrain.lab.bench.schedule import rows, stage_widths
from geotrain.lab.bench.stage import SleepStage, make_batch, stage_of

_COLLECTIVE_LIMIT = timedelta(minutes=30)
"""Whoever started this process has the deadline."""


def main() -> None:
    work, rank, store = Work.from_json(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    variants = sys.argv[4].split(",")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=work.num_stages, timeout=_COLLECTIVE_LIMIT
    )
    if rank == 0:
        print(json.dumps({"ready": True}), flush=True)
    for variant in variants:
        _measure(work, rank, variant)
        dist.barrier()
    dist.destroy_process_group()


def _measure(work: Work, rank: int, variant: str) -> None:
    module = stage_of(work, rank)
    x, target = make_batch(work)
    example = x[:1]
    stage = PipelineStage(
        module,
        rank,
        work.num_stages,
        torch.device("cpu"),
        input_args=(example.clone().requires_grad_(rank > 0),),
        output_args=(example.clone().requires_grad_(True),),
    )
    schedule = _schedule(work, module, stage, variant)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    inputs = (x,) if rank == 0 else ()
    is_last = rank == work.num_stages - 1
    options: dict[str, Any] = {"target": target, "losses": []} if is_last else {}
    began = time.monotonic()
    for _ in range(work.steps):
        schedule.step(*inputs, **options)
        optimizer.step()
        optimizer.zero_grad()
        ended = time.monotonic()
        if rank == 0:
            print(json.dumps({"variant": variant, "step_s": ended - began}), flush=True)
        began = ended


def _schedule(work: Work, module: SleepStage, stage: PipelineStage, variant: str) -> Any:
    count = work.first_count
    if variant == "1f1b":
        return Schedule1F1B(stage, n_microbatches=count, loss_fn=module.loss)
    if variant == "gpipe":
        return ScheduleGPipe(stage, n_microbatches=count, loss_fn=module.loss)
    first = int(variant.removeprefix("csv"))
    widths = stage_widths(first, num_stages=work.num_stages, num_microbatches=count)
    # A private class of torch, without annotations.
    schedule = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        [stage], n_microbatches=count, loss_fn=module.loss
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.csv"
        with file.open("w", newline="") as out:
            csv.writer(out).writerows(rows(widths, count))
        schedule._load_csv(str(file))
    return schedule


if __name__ == "__main__":
    main()
