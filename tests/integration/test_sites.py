"""The two sites of deploy/sites as their comments say, on this machine: only addresses differ.

Virginia runs as the Slurm script does it, Frankfurt under torchrun.
"""

import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from harness import start_process

from tests.free_ports import free_ports

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCRIPT = DEPLOY / "examples" / "nanogpt.py"
BIN = Path(sys.executable).parent
LIMIT_S = 120.0
STEPS = 3


def lay_sites(folder: Path) -> None:
    """Copies of the site files with addresses of this machine, and free ports."""
    (port,) = free_ports(1)
    for source in (DEPLOY / "sites").iterdir():
        text = source.read_text(encoding="utf-8").replace("10.8.0.2:7070", f"127.0.0.1:{port}")
        for own in ("127.0.0.1:7070", "127.0.0.1:7071"):
            text = text.replace(own, "127.0.0.1:0")
        (folder / source.name).write_text(text)


@pytest.mark.skipif(not (BIN / "geotrain").exists(), reason="geotrain is not installed here")
def test_both_sites_train_as_their_files_say(tmp_path):
    lay_sites(tmp_path)
    train = [str(SCRIPT), "--steps", str(STEPS), "--every", "3"]
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    virginia = start_process(
        ["bash", str(DEPLOY / "slurm" / "geotrain.sbatch")],
        name="virginia",
        log=tmp_path / "virginia.log",
        env={
            **environment,
            "SITE": str(tmp_path / "virginia.toml"),
            "TRAIN": " ".join([sys.executable, *train, "--checkpoints", str(tmp_path / "v")]),
        },
    )
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "1", *train]
    frankfurt = start_process(
        [
            *(str(BIN / "geotrain"), "run", "--config", str(tmp_path / "frankfurt.toml"), "--"),
            *(*torchrun, "--checkpoints", str(tmp_path / "f")),
        ],
        name="frankfurt",
        log=tmp_path / "frankfurt.log",
        env=environment,
    )
    deadline = time.monotonic() + LIMIT_S
    try:
        statuses = [process.wait(deadline=deadline) for process in (virginia, frankfurt)]
        assert statuses == [0, 0], f"{virginia.tail()}\n{frankfurt.tail()}"
    finally:
        for process in (virginia, frankfurt):
            process.stop()
    for process in (virginia, frankfurt):
        assert "SIGTERM" not in process.output(), "an end in order reads like a failure"
        assert "= the daemon ends: its training process is done" in process.output()
    steps = re.findall(r"^step (\d+) loss", virginia.output(), flags=re.MULTILINE)
    assert list(map(int, steps)) == list(range(1, STEPS + 1))
    assert "virginia.toml is fine" in virginia.output()
    for folder, region in (("v", "virginia"), ("f", "frankfurt")):
        assert (tmp_path / folder / f"step-{STEPS:08}" / region).is_dir()
    shutil.rmtree(tmp_path / f"geotrain-{os.getuid()}", ignore_errors=True)
