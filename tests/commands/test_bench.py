"""`geotrain bench step`: its options, and the files that follow from them."""

import subprocess
import sys

import pytest

from geotrain.commands.bench import parse
from geotrain.config import load_config
from geotrain.lab.bench.options import BenchOptions, Work, site_toml

WORK = Work(
    forward_s=[0.02, 0.02],
    backward_s=[0.04, 0.04],
    boundary_bytes=1 << 20,
    num_microbatches=32,
    steps=5,
)


def test_defaults():
    assert parse(["step"]) == BenchOptions(work=WORK)


def test_windows_may_follow_the_links():
    assert parse(["step", "--window", "auto"]) == BenchOptions(work=WORK, window="auto")


def test_every_option():
    given = "--regions 3 --microbatches 8 --forward-ms 10,20,15 --backward-ms 20 --boundary-kib 64 "
    given += "--rtt-ms 50 --mbit 200 --loss 0.001 --jitter-ms 2 --steps 3 --window 7,4,1 "
    given += "--limit-s 30 --congestion cubic --emulator netns --against torch --json"
    assert parse(["step", *given.split()]) == BenchOptions(
        work=Work(
            forward_s=[0.01, 0.02, 0.015],
            backward_s=[0.02, 0.02, 0.02],
            boundary_bytes=64 << 10,
            num_microbatches=8,
            steps=3,
        ),
        rtt_s=0.05,
        mbit=200.0,
        loss=0.001,
        jitter_s=0.002,
        window=(7, 4, 1),
        congestion="cubic",
        limit_s=30.0,
        emulator="netns",
        against_torch=True,
        json=True,
    )


@pytest.mark.parametrize(
    ("given", "window"), [("classic", "classic"), ("hide", "hide"), ("4,1", (4, 1))]
)
def test_windows_by_name_or_number(given, window):
    assert parse(["step", "--window", given]).window == window


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--regions 1", "--regions must be from 2 to 16"),
        ("--microbatches 0", "--microbatches must be from 1"),
        ("--steps 1", "--steps must be from 2"),
        ("--window 8", "--window needs one number for each of the 2 regions"),
        ("--window 0,1", "--window numbers must be from 1"),
        ("--window wide", "invalid _window value"),
        ("--forward-ms 1,2,3", "--forward-ms needs one number, or one for each region"),
        ("--backward-ms -1", "--backward-ms must be from 0"),
        ("--loss 1", "--loss must be from 0 to 0.5"),
        ("--limit-s 0", "--limit-s must be from 1"),
        ("--boundary-kib 0", "--boundary-kib must be from 1"),
        ("--emulator relay --against torch", "sites with addresses of their own"),
        ("--emulator relay --congestion bbr", "relays cannot choose"),
    ],
)
def test_what_cannot_be_is_refused(given, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["step", *given.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("window", "written"),
    [("auto", "auto"), ("classic", [3, 2, 1]), ("hide", [8, 8, 1]), ((9, 6, 1), [8, 6, 1])],
)
def test_the_files_are_valid_and_agree_on_the_run(tmp_path, window, written):
    work = Work(
        forward_s=[0.01] * 3,
        backward_s=[0.02] * 3,
        boundary_bytes=8 << 20,
        num_microbatches=8,
        steps=2,
    )
    options = BenchOptions(work=work, window=window)
    configs = []
    for index, name in enumerate(options.names):
        dial = "10.77.0.2:7400" if index < 2 else None
        text = site_toml(options, index, folder=tmp_path, listen="127.0.0.1:0", dial=dial)
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        configs.append(load_config(file))
    assert len({config.run.hash for config in configs}) == 1
    assert [config.index for config in configs] == [0, 1, 2]
    assert configs[0].run.plan.window == written
    assert configs[0].site.arena_mib > 8 * 8


def test_its_help_does_not_wait_for_torch():
    code = (
        "import sys, geotrain.commands.bench\n"
        "assert 'torch' not in sys.modules and 'aiohttp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
