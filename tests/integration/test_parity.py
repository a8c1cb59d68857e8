"""Bit for bit what one plain torch process computes, whatever the split.

A *grid point* is a number of regions, a microbatch count, a precision and a codec. At each one real
daemons and processes run all cases, one pipeline after another in the same processes, because the
start of a process costs more than a case does, or a whole point.
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Process, Regions, RunSpec, start_process
from parity_cases import CASES, GLOBAL_BATCH, SEED, STEPS, Case
from parity_models import NUM_LAYERS

HERE = Path(__file__).parent
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(600)  # the first test waits for all processes


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


def spec_of(point: Point) -> RunSpec:
    return RunSpec(
        regions=point.regions,
        layers=NUM_LAYERS,
        microbatches=point.microbatches,
        global_batch=GLOBAL_BATCH,
        precision=point.precision,
        codec=point.codec,
        window=point.window,
        seed=SEED,
    )


class Grid:
    """The outcomes of some points and of their references, from as few processes as may be.

    One process runs all references, one all points of a single region, and one for each region all
    points of several, whose daemons are each point's own. All these run at once.
    """

    def __init__(self, folder: Path, points: Iterable[Point]) -> None:
        self._folder = folder
        self._places = {point: Regions(folder / str(point), spec_of(point)) for point in points}
        self._processes: list[Process] = []
        self._failure = ""
        self._loaded: dict[Path, Outcome] = {}

    def regions(self, point: Point) -> list[Outcome]:
        """The outcome in every region."""
        return [self._load(path) for path in self._outcomes(point).values()]

    def reference(self, point: Point) -> Outcome:
        """The outcome of the plain script."""
        return self._load(self._reference(point))

    def run(self) -> None:
        """Where a process fails, the outcomes before stay; who asks for another is told why."""
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [process.stop() for process in self._processes])
            for place in self._places.values():
                stack.enter_context(place)
            try:
                for name, command in self._commands().items():
                    self._start(name, command)
                self._run_points()
            except AssertionError as error:
                self._failure = str(error)

    def _run_points(self) -> None:
        for point, place in self._places.items():
            if point.regions > 1:
                place.start_daemons()
                self._await(self._outcomes(point).values(), place.daemons.values())
                assert set(place.stop_daemons().values()) <= {0}, place.all_tails()
        for point in self._places:
            self._await([*self._outcomes(point).values(), self._reference(point)], ())

    def _commands(self) -> dict[str, list[str]]:
        """A script and its arguments for each process."""
        references = {
            self._reference(point): (point.precision, point.microbatches) for point in self._places
        }
        commands = {"plain": ["plain_reference.py"]}
        for path, (precision, microbatches) in references.items():
            commands["plain"] += [str(path), precision, str(microbatches)]
        for point, place in self._places.items():
            for name, path in self._outcomes(point).items():
                process = name if point.regions > 1 else "alone"
                command = commands.setdefault(process, ["parity_rank.py"])
                command += [str(place.rank_config(name)), str(path), point.precision]
        return commands

    def _start(self, name: str, command: Sequence[str]) -> None:
        script, *args = command
        command = [sys.executable, str(HERE / script), *args]
        self._processes.append(start_process(command, name=name, log=self._folder / f"{name}.log"))

    def _outcomes(self, point: Point) -> dict[str, Path]:
        place = self._places[point]
        return {name: place.folder / f"{name}.pt" for name in place.spec.names}

    def _reference(self, point: Point) -> Path:
        return self._folder / f"{point.precision}-M{point.microbatches}.pt"

    def _await(self, paths: Iterable[Path], daemons: Iterable[Process]) -> None:
        paths, daemons = list(paths), list(daemons)
        deadline = time.monotonic() + LIMIT_S
        while not all(path.exists() for path in paths):
            for process in (*self._processes, *daemons):
                status = process.popen.poll()
                ended_well = status == 0 and process not in daemons
                assert status is None or ended_well, f"{process.name} ended:\n{process.tail()}"
            assert time.monotonic() < deadline, f"not in time: {paths}\n{self._tails(daemons)}"
            time.sleep(0.02)

    def _tails(self, daemons: Iterable[Process]) -> str:
        everyone = (*self._processes, *daemons)
        return "\n".join(f"--- {process.name}\n{process.tail()}" for process in everyone)

    def _load(self, path: Path) -> Outcome:
        if path not in self._loaded:
            if not path.exists():
                pytest.fail(f"no {path.name}: {self._failure}")
            self._loaded[path] = torch.load(path, weights_only=True)
        return self._loaded[path]


@pytest.fixture(scope="module")
def grid(request, tmp_path_factory):
    """All points that the selected tests need."""
    wanted = {
        item.callspec.params["point"]
        for item in request.session.items
        if item.path == request.path and "point" in item.fixturenames
    }
    wanted |= {point.alone for point in wanted}
    grid = Grid(tmp_path_factory.mktemp("parity"), [point for point in POINTS if point in wanted])
    grid.run()
    return grid


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
