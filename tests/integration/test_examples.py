"""The examples of deploy/examples: alone without a daemon, and over two regions with real ones."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Regions, RunSpec, start_process

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
LIMIT_S = 120.0
STEP = re.compile(r"^step (\d+) loss ([\d.]+)", re.MULTILINE)
STOPPED = re.compile(r"^stopped after step (\d+): r1: SIGTERM$", re.MULTILINE)
EARLY_STOP = ("--steps", "400", "--every", "2", "--patience", "1")
ENDED = re.compile(r"^region (\w+) ended after step (\d+): (.*)$", re.MULTILINE)


ALONE = {
    "plain_model.py": ("--steps", "6", "--every", "3"),
    "early_stop.py": EARLY_STOP,
    "nanogpt.py": ("--steps", "4", "--every", "2"),
}
ONE_AFTER_ANOTHER = """
import contextlib, json, runpy, sys
for script, options, output in json.loads(sys.argv[1]):
    sys.argv = [script, *options]
    with open(output, "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(script, run_name="__main__")
"""


def spec(num_layers: int) -> RunSpec:
    """The seed is that of a script alone, so that both train the same."""
    return RunSpec(regions=2, layers=num_layers, microbatches=4, global_batch=32, seed=0)


def run_in_regions(folder: Path, example: str, *options: str, num_layers: int) -> dict[str, str]:
    """What the script printed in each region."""
    with Regions(folder, spec(num_layers)) as regions:
        for name in regions.spec.names:
            regions.start_rank(name, EXAMPLES / example, *options)
        regions.start_daemons()
        regions.expect_success(deadline=time.monotonic() + LIMIT_S)
        assert regions.stop_daemons() == {"r0": 0, "r1": 0}
        return {name: rank.output() for name, rank in regions.ranks.items()}


def losses(output: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in STEP.findall(output)]


def close(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    """Alone there is one microbatch, so the sums are rounded in another order."""
    return len(found) == len(expected) and all(
        a == b and x == pytest.approx(y, abs=2e-3)
        for (a, x), (b, y) in zip(found, expected, strict=True)
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """What an example prints without a daemon; waits for it.

    All run in one process, to load torch once, and beside the first regions.
    """
    folder = tmp_path_factory.mktemp("alone")
    jobs = [
        (str(EXAMPLES / name), options, str(folder / f"{name}.out"))
        for name, options in ALONE.items()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GEOTRAIN_CONFIG", raising=False)
        command = [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(jobs)]
        process = start_process(command, name="the examples alone", log=folder / "log")

    def output(name: str) -> str:
        assert process.wait(deadline=time.monotonic() + LIMIT_S) == 0, process.tail()
        return (folder / f"{name}.out").read_text()

    try:
        yield output
    finally:
        process.stop()


def test_a_plain_model_trains_the_same_alone_and_over_two_regions(tmp_path, alone):
    example = "plain_model.py"
    regions = run_in_regions(tmp_path, example, *ALONE[example], num_layers=9)
    printed = alone(example)
    steps = losses(printed)
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1][1] < steps[0][1]
    assert close(losses(regions["r0"]), steps)
    assert regions["r0"].count("held-out loss") == printed.count("held-out loss") == 2
    assert losses(regions["r1"]) == [], "one region speaks for all"


def test_an_early_stop_ends_all_regions_after_the_same_step(tmp_path, alone):
    example = "early_stop.py"
    regions = run_in_regions(tmp_path, example, *EARLY_STOP, num_layers=8)
    for output, decided_by in (
        (alone(example), "solo"),
        *((text, "r1") for text in regions.values()),
    ):
        ((_, step, why),) = ENDED.findall(output)
        assert int(step) < 400
        assert why == f"{decided_by}: no gain in 1 evaluations"
    ends = {ENDED.findall(text)[0][1] for text in regions.values()}
    assert len(ends) == 1
    assert "accuracy" in regions["r1"]
    assert "accuracy" not in regions["r0"], "only the last region can count what was right"


def test_nanogpt_alone_and_over_two_regions_that_are_stopped_and_started_again(tmp_path, alone):
    """SIGTERM to one region: all end after the same step, save it, and go on from there later."""
    script, checkpoints = EXAMPLES / "nanogpt.py", tmp_path / "checkpoints"
    deadline = time.monotonic() + LIMIT_S

    def start(regions: Regions, steps: int) -> None:
        for name in regions.spec.names:
            folder = str(checkpoints / name)  # at two sites these are two disks
            regions.start_rank(name, script, "--steps", str(steps), "--checkpoints", folder)

    with Regions(tmp_path / "regions", spec(4)) as regions:
        start(regions, 1_000_000)
        regions.start_daemons()
        while "step 4 " not in regions.ranks["r0"].output():
            assert time.monotonic() < deadline, regions.all_tails()
            assert regions.ranks["r0"].popen.poll() is None, regions.all_tails()
            time.sleep(0.02)
        regions.ranks["r1"].popen.terminate()
        regions.expect_success(deadline=deadline)
        output = regions.ranks["r0"].output()
        (last,) = map(int, STOPPED.findall(output))
        for name in regions.spec.names:
            assert (checkpoints / name / f"step-{last:08}" / name).is_dir()
        assert alone("nanogpt.py").count("held-out loss") == 2
        # While it warms up, the learning rate does not depend on how many steps there will be.
        assert close(losses(output)[:4], losses(alone("nanogpt.py")))

        start(regions, last + 2)  # the daemons are still the same
        regions.expect_success(deadline=deadline)
        output = regions.ranks["r0"].output()
        assert f"resumed after step {last}\n" in output
        assert [step for step, _ in losses(output)] == [last + 1, last + 2]
