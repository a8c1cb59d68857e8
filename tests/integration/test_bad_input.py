"""Each mistake is one error that names its place, the same in both regions; the daemons live on."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import Regions, RunSpec

SCRIPT = Path(__file__).with_name("bad_input_rank.py")
LIMIT_S = 90.0


MISTAKES = [
    ("another tree", "r0", "boundary", 2, 0, ["(float32, NoneType)", "float32"]),
    ("another dtype", "r0", "boundary", 2, 0, ["float64", "float32"]),
    ("a shape that does not fit", "r1", "exception", 2, 0, ["RuntimeError", "3x5"]),
    ("an exception in a model", "r1", "exception", 2, 1, ["the third layer gave up"]),
    ("step here and evaluate there", "r1", "call", 2, None, ["evaluate", "step"]),
    ("different models", None, "mismatch", None, None, ["r0", "r1", "model"]),
    ("a batch of no samples", "r0", "batch", 2, None, ["no samples"]),
    ("another count of targets", "r1", "targets", 1, None, ["144", "72"]),
    ("a loader where none is read", "r1", "batch", 1, None, ["only region r0 reads"]),
]
"""Case, and the region, kind, step and microbatch of its error, and words in it."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two regions whose daemons serve all tests here, one after another."""
    with Regions(tmp_path_factory.mktemp("bad"), RunSpec(silent_s=5.0, wait_s=20.0)) as regions:
        regions.start_daemons()
        yield regions
        assert all(daemon.popen.poll() is None for daemon in regions.daemons.values())


@pytest.fixture(scope="module")
def tried(pair):
    """All mistakes have been made, in one process a region: its start takes longer than a case."""
    cases = [case for case, *_ in MISTAKES]
    for name in pair.spec.names:
        pair.start_rank(name, SCRIPT, name, str(pair.folder), *cases)
    pair.expect_success(deadline=time.monotonic() + LIMIT_S)
    return pair


def errors_of(tried: Regions, case: str) -> list[dict]:
    files = [tried.folder / f"{name}.{case}.json" for name in tried.spec.names]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("case", "region", "kind", "step", "microbatch", "words"),
    MISTAKES,
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_mistake_is_one_named_error(tried, case, region, kind, step, microbatch, words):
    first, second = errors_of(tried, case)
    assert first and second, f"somebody went on:\n{tried.all_tails()}"
    assert first["kind"] == second["kind"] == kind, (first, second)
    if region is None:  # both see it at once, and each says it
        for error in (first, second):
            assert all(word in error["text"] for word in words), error
        return
    assert first == second
    assert (first["region"], first["step"], first["microbatch"]) == (region, step, microbatch)
    assert f"region {region}" in first["text"]
    assert all(word in first["detail"] for word in words), first["detail"]


ATTACH = """\
import sys, geotrain
first, *others = sys.argv[1:]
region = geotrain.attach(first)
for config in others:
    try:
        geotrain.attach(config, timeout_s=20.0)
    except geotrain.AttachError as error:
        print(error)
region.close()
"""


def test_a_rank_that_has_no_place_here_is_refused(pair, tmp_path):
    """A second one, one of another region, and one of another run."""
    own = pair.rank_config("r0")
    another_region, another_run = tmp_path / "region.toml", tmp_path / "run.toml"
    text = own.read_text()
    another_region.write_text(text.replace('[site]\nname = "r0"', '[site]\nname = "r1"'))
    another_run.write_text(text.replace("seed = 11", "seed = 12"))
    process = subprocess.Popen(
        [sys.executable, "-c", ATTACH, *map(str, (own, own, another_region, another_run))],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        second, region, run = process.communicate(timeout=LIMIT_S)[0].splitlines()
    assert process.returncode == 0
    assert f"rank 0 of region r0 is already attached (pid {process.pid})" in second
    assert "serves region r0, not r1" in region
    assert "[run] of this process is not the one" in run
