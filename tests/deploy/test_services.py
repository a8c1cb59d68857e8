"""The systemd unit and the Slurm script, without the one's machine or the other's cluster."""

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployed import DEPLOY, REGIONS, mebibytes, site

UNIT = DEPLOY / "systemd" / "geotrain-daemon.service"
SBATCH = DEPLOY / "slurm" / "geotrain.sbatch"
INSTALLED = "/opt/geotrain/venv/bin/geotrain"
LIMIT_S = 60

SBATCH_OPTIONS = {
    *("job-name", "nodes", "ntasks", "cpus-per-task", "mem", "time", "signal"),
    *("requeue", "open-mode", "output"),
}

STUB = """#!/usr/bin/env bash
echo "${XDG_RUNTIME_DIR-unset}|$*" >> "$CALLS"
[ "$1" = check ] && exit "${CHECK_STATUS:-0}"
exit 7
"""


class Unit(configparser.RawConfigParser):
    """A unit file; of a key that stands twice the last value."""

    def __init__(self) -> None:
        super().__init__(strict=False, comment_prefixes=("#",), interpolation=None)

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = Unit()
    unit.read(UNIT, encoding="utf-8")
    assert set(unit) == {"DEFAULT", "Unit", "Service", "Install"}
    return unit["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path):
    """Its exit status is 0 for unknown keys too, so it must have nothing to say."""
    stub = tmp_path / "geotrain"
    stub.write_text("#!/bin/sh\n")
    stub.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(INSTALLED, str(stub)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    own = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
    assert (done.returncode, own) == (0, [])


def test_the_unit_checks_the_config_and_does_not_retry_a_wrong_one(service):
    assert service["ExecStartPre"] == f"{INSTALLED} check --config /etc/geotrain/site.toml"
    assert service["ExecStart"] == f"{INSTALLED} daemon --config /etc/geotrain/site.toml"
    assert service["RestartPreventExitStatus"] == "2"


def test_the_units_socket_is_in_the_folder_that_systemd_makes(service):
    assert service["RuntimeDirectory"] == "geotrain"
    assert service["RuntimeDirectoryMode"] == "0700"
    text = UNIT.read_text(encoding="utf-8")
    assert "Environment=XDG_RUNTIME_DIR=/run\n" in text
    assert "env XDG_RUNTIME_DIR=/run GEOTRAIN_CONFIG=" in text  # what it tells the trainer
    assert service["User"] not in ("", "root")


def test_the_unit_leaves_the_daemon_time_to_say_goodbye(service):
    from geotrain.daemon.main import GOODBYE_TIMEOUT_S

    assert float(service["TimeoutStopSec"]) > 2 * GOODBYE_TIMEOUT_S


def sbatch_options() -> dict[str, str]:
    lines = SBATCH.read_text(encoding="utf-8").splitlines()
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH ")]
    return dict((option.partition("=")[0], option.partition("=")[2]) for option in options)


def test_the_slurm_script_is_bash():
    done = subprocess.run(["bash", "-n", str(SBATCH)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurms_options_stand_before_the_first_command():
    lines = SBATCH.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[first:])
    assert set(sbatch_options()) == SBATCH_OPTIONS


def test_slurms_signal_leaves_time_for_the_last_step():
    from geotrain.commands.run import COMMAND_GRACE_S

    to, _, before_s = sbatch_options()["signal"].partition("@")
    assert to == "B:TERM"  # the batch shell, which the script replaces
    assert float(before_s) > COMMAND_GRACE_S
    assert "\nexec geotrain run " in SBATCH.read_text(encoding="utf-8")


def test_slurms_memory_holds_the_arena():
    for region in REGIONS:
        asked = mebibytes(sbatch_options()["mem"].replace("G", "g"))
        assert asked > 2 * site(region).site.arena_mib


def run_script(folder: Path, **variables: str) -> tuple[int, list[str]]:
    """Exit status, and each call of `geotrain` as "XDG_RUNTIME_DIR|arguments"."""
    stub = folder / "geotrain"
    stub.write_text(STUB)
    stub.chmod(0o755)
    calls = folder / "calls"
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls)}
    environment["XDG_RUNTIME_DIR"] = "/run/user/0/of/the/login/node"
    done = subprocess.run(
        ["bash", str(SBATCH)], env={**environment, **variables}, timeout=30, cwd=DEPLOY.parent
    )
    return done.returncode, calls.read_text().splitlines()


def test_the_slurm_script_checks_and_becomes_the_run(tmp_path):
    status, calls = run_script(tmp_path)
    assert status == 7
    assert calls == [
        "unset|check --config deploy/sites/virginia.toml",
        "unset|run --config deploy/sites/virginia.toml -- python deploy/examples/nanogpt.py "
        "--steps 2000 --checkpoints checkpoints",
    ]


def test_the_slurm_script_takes_another_site_and_command(tmp_path):
    variables = {"SITE": "my site.toml", "TRAIN": f"{sys.executable} train.py --steps 3"}
    _, calls = run_script(tmp_path, **variables)
    assert calls[1] == f"unset|run --config my site.toml -- {sys.executable} train.py --steps 3"


def test_the_slurm_script_ends_at_a_wrong_config(tmp_path):
    status, calls = run_script(tmp_path, CHECK_STATUS="2")
    assert (status, len(calls)) == (2, 1)
