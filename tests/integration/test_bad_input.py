"""Each mistake is one error that names its place, the same in both regions; the daemons live on."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import Regions, RunSpec

SCRIPT = Path(__file__).with_name("bad_input_rank.py")
LIMIT_S = 40.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two regions whose daemons serve all tests here, one after another."""
    with Regions(tmp_path_factory.mktemp("bad"), RunSpec(silent_s=5.0, wait_s=20.0)) as regions:
        regions.start_daemons()
        yield regions
        assert all(daemon.popen.poll() is None for daemon in regions.daemons.values())


def errors_of(pair: Regions, case: str) -> list[dict]:
    for name in pair.spec.names:
        pair.start_rank(name, SCRIPT, name, str(pair.folder), case)
    pair.expect_success(deadline=time.monotonic() + LIMIT_S)
    return [json.loads((pair.folder / f"{name}.json").read_text()) for name in pair.spec.names]


@pytest.mark.parametrize(
    ("case", "region", "kind", "step", "microbatch", "words"),
    [
        ("another tree", "r0", "boundary", 2, 0, ["(float32, NoneType)", "float32"]),
        ("another dtype", "r0", "boundary", 2, 0, ["float64", "float32"]),
        ("a shape that does not fit", "r1", "exception", 2, 0, ["RuntimeError", "3x5"]),
        ("an exception in a model", "r1", "exception", 2, 1, ["the third layer gave up"]),
        ("step here and evaluate there", "r1", "call", 2, None, ["evaluate", "step"]),
        ("different models", None, "mismatch", None, None, ["r0", "r1", "model"]),
        ("a batch of no samples", "r0", "batch", 2, None, ["no samples"]),
        ("another count of targets", "r1", "targets", 1, None, ["144", "72"]),
        ("a loader where none is read", "r1", "batch", 1, None, ["only region r0 reads"]),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_mistake_is_one_named_error(pair, case, region, kind, step, microbatch, words):
    first, second = errors_of(pair, case)
    assert first and second, f"somebody went on:\n{pair.all_tails()}"
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
try:
    geotrain.attach(sys.argv[1], timeout_s=5.0)
except geotrain.AttachError as error:
    print(error)
    sys.exit(3)
if sys.argv[2:]:
    print("attached", flush=True)
    sys.stdin.read()
"""


def test_a_second_rank_for_one_place_is_refused(pair):
    config = str(pair.rank_config("r0"))
    holder = subprocess.Popen(
        [sys.executable, "-c", ATTACH, config, "hold"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "attached\n"
        second = subprocess.run(
            [sys.executable, "-c", ATTACH, config], capture_output=True, text=True, timeout=LIMIT_S
        )
        holder.communicate(timeout=LIMIT_S)
    assert second.returncode == 3, second.stderr
    assert f"rank 0 of region r0 is already attached (pid {holder.pid})" in second.stdout


def test_a_rank_for_another_region_is_refused(pair, tmp_path):
    text = pair.rank_config("r0").read_text()
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(text.replace('[site]\nname = "r0"', '[site]\nname = "r1"'))
    refused = subprocess.run(
        [sys.executable, "-c", ATTACH, str(wrong)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert refused.returncode == 3, refused.stderr
    assert "r0" in refused.stdout
    assert "r1" in refused.stdout


def test_a_rank_with_another_run_is_refused(pair, tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(pair.rank_config("r0").read_text().replace("seed = 11", "seed = 12"))
    refused = subprocess.run(
        [sys.executable, "-c", ATTACH, str(wrong)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert refused.returncode == 3, refused.stderr
    assert "run" in refused.stdout
