"""Bit for bit what one plain torch process computes, whatever the split.

A *grid point* is a number of regions, a microbatch count, a precision and a codec. At each one real
daemons and processes run all cases, one pipeline after another in the same processes, because the
start of a process costs more than a case does.
"""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Regions, RunSpec, start_process
from parity_cases import CASES, GLOBAL_BATCH, SEED, STEPS, Case
from parity_models import NUM_LAYERS

HERE = Path(__file__).parent
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Point:
    regions: int
    microbatches: int
    precision: str = "fp32"
    codec: str = "none"
    window: int | str = "classic"

    def __str__(self) -> str:
        return f"S{self.regions}-M{self.microbatches}-{self.precision}-{self.codec}"

    @property
    def alone(self) -> "Point":
        """The same with one region."""
        return Point(regions=1, microbatches=self.microbatches, precision=self.precision)


POINTS = [
    Point(regions=1, microbatches=3),
    Point(regions=2, microbatches=3),
    Point(regions=4, microbatches=3, codec="planes", window="auto"),
    Point(regions=1, microbatches=8),
    Point(regions=3, microbatches=8, window=8),
    Point(regions=1, microbatches=1),
    Point(regions=2, microbatches=1),
    Point(regions=1, microbatches=8, precision="bf16"),
    Point(regions=2, microbatches=8, precision="bf16", codec="planes", window=4),
]

Outcome = dict[str, dict[str, Any]]
"""What was found, by case."""


class Grid:
    """Runs each point and each reference once, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[Any, Any] = {}

    def regions(self, point: Point) -> list[Outcome]:
        """The outcome in every region."""
        return self._once(point, lambda folder: run_regions(point, folder))

    def reference(self, point: Point) -> Outcome:
        """The outcome of the plain script."""
        key = (point.precision, point.microbatches)
        return self._once(key, lambda folder: run_reference(point, folder))

    def _once(self, key: Any, run: Any) -> Any:
        if key not in self._done:
            folder = self._folder / str(len(self._done))
            folder.mkdir()
            try:
                self._done[key] = run(folder)
            except AssertionError as error:
                self._done[key] = error
                raise
        if isinstance(self._done[key], AssertionError):
            pytest.fail(f"the run of {key} failed, see the first of these failures")
        return self._done[key]


def run_regions(point: Point, folder: Path) -> list[Outcome]:
    spec = RunSpec(
        regions=point.regions,
        layers=NUM_LAYERS,
        microbatches=point.microbatches,
        global_batch=GLOBAL_BATCH,
        precision=point.precision,
        codec=point.codec,
        window=point.window,
        seed=SEED,
    )
    with Regions(folder, spec) as regions:
        regions.run(HERE / "parity_rank.py", str(folder), point.precision, limit_s=LIMIT_S)
        assert set(regions.stop_daemons().values()) <= {0}, regions.all_tails()
    return [torch.load(folder / f"{name}.pt", weights_only=True) for name in spec.names]


def run_reference(point: Point, folder: Path) -> Outcome:
    out = folder / "reference.pt"
    command = [sys.executable, str(HERE / "plain_reference.py"), str(out)]
    command += [point.precision, str(point.microbatches)]
    process = start_process(command, name="plain reference", log=folder / "log")
    try:
        status = process.wait(deadline=time.monotonic() + LIMIT_S)
        assert status == 0, process.tail()
    finally:
        process.stop()
    outcome: Outcome = torch.load(out, weights_only=True)
    return outcome


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return Grid(tmp_path_factory.mktemp("parity"))


def merged(outcomes: list[Outcome], case: Case, what: str) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for outcome in outcomes:
        own = outcome[case.name][what]
        assert not own.keys() & whole.keys(), "two regions own one parameter"
        whole |= own
    return whole


def assert_bit_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        same = torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))
        difference = (found[name].double() - value.double()).abs().max()
        assert same, f"{name} differs by up to {difference:.3g}"


def assert_moved(case: Case, outcomes: list[Outcome]) -> None:
    initial = merged(outcomes, case, "initial")
    for name, value in merged(outcomes, case, "parameters").items():
        moved = not torch.equal(value, initial[name])
        assert moved != name.startswith(case.frozen or ("no such",)), f"{name}: moved is {moved}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_regions_compute_what_one_plain_process_computes(grid, point, case):
    outcomes = grid.regions(point)
    found = outcomes[0][case.name]
    for outcome in outcomes[1:]:
        for what in ("losses", "norms", "evaluations", "skipped"):
            assert outcome[case.name][what] == pytest.approx(found[what], rel=0, nan_ok=True)
    assert found["skipped"] == ([case.skipped_step] if case.skipped_step >= 0 else [])
    assert_moved(case, outcomes)
    if case.random:
        expected = grid.regions(point.alone)[0][case.name]
    else:
        expected = grid.reference(point)[case.name]
    assert_bit_equal(merged(outcomes, case, "initial"), expected["initial"])
    assert_bit_equal(merged(outcomes, case, "parameters"), expected["parameters"])
    for step in range(STEPS):
        if step != case.skipped_step or math.isfinite(expected["norms"][step]):
            assert found["norms"][step] == expected["norms"][step], f"norm of step {step}"
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6, nan_ok=True)
    assert found["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-6)
    assert len(found["evaluations"]) == (3 if case.evaluate else 0)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_batches_are_cut_as_planned(grid, point):
    found = grid.regions(point)[0]
    planned = point.microbatches
    assert found["plain"]["num_microbatches"] == [planned] * STEPS
    short = found["short last batch"]["num_microbatches"]
    assert short == [planned] * (STEPS - 1) + [min(2, planned)]
    # A step without targets has nothing to run.
    assert found["a step without targets"]["num_microbatches"] == [planned, planned, 0] + [
        planned
    ] * (STEPS - 3)


def test_the_reference_imports_nothing_of_geotrain():
    for name in ("plain_reference.py", "parity_cases.py", "parity_models.py"):
        text = (HERE / name).read_text()
        assert "import geotrain" not in text
        assert "from geotrain" not in text
