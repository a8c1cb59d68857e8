"""`geotrain lab` as a person uses it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from geotrain.cli import main
from geotrain.lab.emulator.netns import obstacle
from geotrain.lab.wan import names_of_labs

LIMIT_S = 30.0
NAME = f"test-cli-{os.getpid()}"


@pytest.fixture(autouse=True)
def down() -> Iterator[None]:
    yield
    if NAME in names_of_labs():
        main(["lab", "down", NAME])


def lab(*argv: str) -> int:
    return main(["lab", *argv])


def test_a_lab_lives_from_up_to_down(capsys):
    assert lab("up", NAME, "--emulator", "relay", "--rtt-ms", "40", "--route", "a:b:29500") == 0
    told = capsys.readouterr().out
    assert told.startswith(f"lab {NAME}: relay (relays were asked for; ")
    assert "a reaches port 29500 of b at 127.0.0.1:" in told
    assert lab("status") == 0
    assert NAME in capsys.readouterr().out.split()
    assert lab("set", NAME, "--from", "a", "--to", "b", "--mbit", "8", "--cut") == 0
    assert capsys.readouterr().out == "a to b: 20 ms one way, 8 Mbit/s, queue 200 ms, CUT\n"
    assert lab("status", NAME, "--json") == 0
    there, back = json.loads(capsys.readouterr().out)["links"]
    assert (there["settings"]["cut"], back["settings"]["cut"]) == (True, False)
    assert (there["settings"]["delay_s"], there["settings"]["rate_bytes_per_s"]) == (0.02, 1e6)
    assert lab("set", NAME, "--mend") == 0
    assert lab("status", NAME) == 0
    told = capsys.readouterr().out
    assert "  a to b: 20 ms one way, 8 Mbit/s, queue 200 ms\n" in told
    assert "  changed: a to b: 8 Mbit/s, cut (geotrain lab set)\n" in told
    assert "  changed: every link: mended (geotrain lab set)\n" in told
    assert lab("down", NAME) == 0
    assert NAME not in names_of_labs()


def test_a_check_passes_over_what_is_cut_and_says_on_stderr_what_it_measures(capsys):
    sites = ("--sites", "virginia,frankfurt,tokyo")
    assert lab("up", NAME, "--emulator", "relay", *sites, "--rtt-ms", "2") == 0
    assert lab("set", NAME, "--from", "virginia", "--to", "frankfurt", "--cut") == 0
    capsys.readouterr()
    assert lab("status", NAME, "--check") == 1
    told = capsys.readouterr()
    assert "\nvirginia to frankfurt is cut: not measured\n" in told.out
    assert "\nfrankfurt to virginia: the way back is cut: not measured\n" in told.out
    assert "\nfrankfurt to tokyo: asked round trip 2 ms and any rate, measured " in told.out
    assert "virginia" not in told.err
    for way in ("frankfurt to tokyo", "tokyo to frankfurt"):
        assert f"{way}: measuring, " in told.err


def test_a_script_begins_with_the_lab(tmp_path, capsys):
    script = tmp_path / "weather.toml"
    script.write_text("[[change]]\nat_s = 0\nrtt_ms = 30\n")
    assert lab("up", NAME, "--emulator", "relay", "--script", str(script)) == 0
    assert "the last change is in 0 s" in capsys.readouterr().out


def test_a_lab_whose_script_is_wrong_does_not_stay(tmp_path, capsys):
    script = tmp_path / "weather.toml"
    script.write_text("[[change]]\nat_s = 0\nspeed = 30\n")
    assert lab("up", NAME, "--emulator", "relay", "--script", str(script)) == 2
    assert "unknown key speed" in capsys.readouterr().err
    assert NAME not in names_of_labs()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["set", NAME, "--loss", "0.1"], "no lab called"),
        (["down", NAME], "no lab called"),
        (["exec", NAME, "a"], "no command: geotrain lab exec NAME SITE -- CMD"),
        (["up", NAME, "--sites", "a"], "two sites at least"),
        (["up", NAME, "--loss", "7"], "loss must be a probability"),
        (["up", NAME, "--route", "a:b"], "--route must be FROM:TO:PORT"),
        (["status", "--", "true"], "takes a command"),
    ],
    ids=lambda value: " ".join(value).replace(NAME, "NAME") if isinstance(value, list) else "",
)
def test_what_cannot_be_ends_with_status_2_and_a_reason(argv, message, capsys):
    assert lab(*argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_programs_run_in_a_site_and_end_with_the_lab():
    command = [sys.executable, "-m", "geotrain", "lab"]
    assert lab("up", NAME, "--emulator", "netns", "--sites", "x,y", "--rtt-ms", "10") == 0
    code = "import os, socket; print(os.environ['GEOTRAIN_LAB_SITE'], socket.if_nameindex())"
    done = subprocess.run(
        [*command, "exec", NAME, "y", "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout.startswith("y [(1, 'lo'), ") and "'wan0'" in done.stdout
    missing = subprocess.run([*command, "exec", NAME, "y", "--", "no-such-program"])
    assert missing.returncode == 127
    sleeper = subprocess.Popen(
        [*command, "exec", NAME, "x", "--", "sh", "-c", "echo up; sleep 60"], stdout=subprocess.PIPE
    )
    with sleeper:
        assert sleeper.stdout.readline() == b"up\n"
        assert lab("down", NAME) == 0
        assert sleeper.wait(LIMIT_S) == -9
