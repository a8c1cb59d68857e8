"""Windows that the planner chooses, against a grid of all falling windows, in the simulator.

    python tests/benchmarks/planner_grid.py               200 cases, some minutes on two processors
    python tests/benchmarks/planner_grid.py --cases 20

Two to four stages, equal and unequal, 4 to 32 microbatches, one-way delays up to 200 ms. Windows up
to 8 are all tried, above that every second, fourth or so; the last stage's is 1 or all. A much
smaller grid is part of the test suite (tests/control/test_planner.py), which draws the same cases.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from geotrain.control.costs import pipeline_model  # noqa: E402
from geotrain.pipeline.simulate import simulate  # noqa: E402
from tests.control.test_planner import measured, plan_for, random_line  # noqa: E402

SIZES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32)


def excess(seed: int) -> tuple[int, float]:
    """By how much the planner's step is longer than the best of the grid, and the grid's size."""
    costs = random_line(Random(seed))
    model, count = pipeline_model(*measured(costs)), costs.num_microbatches
    plan, _ = plan_for(costs)
    sizes = [size for size in reversed(SIZES) if size <= count]
    upper = itertools.combinations_with_replacement(sizes, len(costs.forward_s) - 1)
    grid = [(*windows, last) for windows in upper for last in {1, count}]
    best_s = min(simulate(model, num_microbatches=count, windows=w).step_s for w in grid)
    return len(grid), plan.predicted_s / best_s - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    given = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = pool.map(excess, range(given.cases), chunksize=1)
    over = [share for _, share in found]
    result = {
        "cases": given.cases,
        "windows_tried": sum(size for size, _ in found),
        "worst": max(over),
        "mean": sum(over) / len(over),
        "over_1_percent": sum(share > 0.01 for share in over),
    }
    print(json.dumps(result))
    return 0 if result["over_1_percent"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
