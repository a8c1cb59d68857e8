import subprocess
import sys

import pytest

from geotrain import cli
from geotrain.errors import GeotrainError
from geotrain.version import __version__

SITE = """
version = 1
[run]
id = "wiki"
global_batch = 16
regions = [{ name = "virginia", layers = "0:6" }]
[site]
name = "virginia"
"""


@pytest.fixture
def site(tmp_path) -> str:
    file = tmp_path / "site.toml"
    file.write_text(SITE)
    return str(file)


def test_version(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_check_of_a_good_file(site, capsys):
    assert cli.main(["check", "--config", site]) == 0
    assert f"{site} is fine" in capsys.readouterr().out


def test_config_may_come_from_the_environment(site, capsys, monkeypatch):
    monkeypatch.setenv("GEOTRAIN_CONFIG", site)
    assert cli.main(["check"]) == 0
    assert site in capsys.readouterr().out


def test_no_config_says_how_to_give_one(capsys, monkeypatch):
    monkeypatch.delenv("GEOTRAIN_CONFIG", raising=False)
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == (
        "no config file: give --config FILE, or set GEOTRAIN_CONFIG\n"
    )


@pytest.mark.parametrize("command", ["check", "daemon", "status", "run"])
def test_every_problem_is_a_line_and_the_status_2(command, tmp_path, capsys):
    file = tmp_path / "site.toml"
    file.write_text(SITE + "listen = 7\n[site.limit]\n")
    assert cli.main([command, "--config", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{file}: site.") for line in lines)


def test_other_errors_are_one_line_and_the_status_1(site, capsys, monkeypatch):
    def fail(config: object) -> int:
        raise GeotrainError("the machine is full")

    monkeypatch.setattr("geotrain.commands.check.check", fail)
    assert cli.main(["check", "--config", site]) == 1
    assert capsys.readouterr().err == "geotrain: the machine is full\n"


def test_run_wants_a_command(site, capsys):
    assert cli.main(["run", "--config", site, "--"]) == 2
    assert "no command" in capsys.readouterr().err


def test_run_passes_everything_after_the_dashes(site, monkeypatch):
    given: list[list[str]] = []

    def run(config: object, command: list[str]) -> int:
        given.append(command)
        return 3

    monkeypatch.setattr("geotrain.commands.run.run", run)
    assert cli.main(["run", "--config", site, "--", "torchrun", "--config", "x", "--", "y"]) == 3
    assert given == [["torchrun", "--config", "x", "--", "y"]]


def test_demo_gets_its_own_options(monkeypatch):
    monkeypatch.setattr("geotrain.lab.demo.run.main", lambda argv: len(argv))
    assert cli.main(["demo", "--regions", "3", "--help"]) == 3


@pytest.mark.parametrize("argv", [[], ["dance"], ["check", "--speed", "3"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2


def test_a_reader_that_goes_away_is_no_traceback(site):
    code = (
        "import os, sys\n"
        "from geotrain import cli\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); os.close(writer)\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--config", site],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "")
