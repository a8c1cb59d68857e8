"""`geotrain bench step`: its options, and the files that follow from them."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from geotrain.commands.bench import parse
from geotrain.config import load_config
from geotrain.control.journal import Entry
from geotrain.lab.bench.options import BenchOptions, Script, Work, site_toml

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


def test_a_batch_whose_samples_set_what_a_microbatch_costs():
    given = "--microbatches auto --window auto --global-batch 128 --overhead-ms 6,9 --sample-ms 12 "
    given += "--boundary-kib-per-sample 64 --memory-samples 16"
    options = parse(["step", *given.split()])
    work = options.work
    assert (work.num_microbatches, work.global_batch, work.first_count) == ("auto", 128, 8)
    assert (work.boundary_bytes, options.memory_samples) == (64 << 10, 16)
    forward_s, backward_s = work.times_s(32)  # 4 samples each, a third of the time forward
    assert forward_s == pytest.approx([0.018, 0.019])
    assert backward_s == pytest.approx([0.036, 0.038])
    costs = options.costs_with(32)
    assert costs.transfer_s == [4 * (64 << 10) / 125e6]
    text = site_toml(options, 0, folder=Path("x"), listen="127.0.0.1:0", dial=None)
    site = tomllib.loads(text)
    assert site["run"]["plan"] == {"microbatches": "auto", "window": "auto"}
    assert (site["run"]["global_batch"], site["site"]["limits"]["in_flight_samples"]) == (128, 16)


def test_a_script_is_read_and_checked_before_anything_starts(tmp_path, capsys):
    file = tmp_path / "weather.toml"
    file.write_text("[[change]]\nat_s = 3\nrtt_ms = 300\n")
    assert parse(["step", "--script", str(file)]).script == Script(
        text=file.read_text(), file=str(file)
    )
    file.write_text('[[change]]\nat_s = 3\nbetween = ["a", "b"]\nrtt_ms = 300\n')
    with pytest.raises(SystemExit):
        parse(["step", "--script", str(file)])
    assert "weather.toml: change 1: there is no link a and b" in capsys.readouterr().err


def test_the_plans_of_another_run_are_repeated(tmp_path):
    file = tmp_path / "plan.jsonl"
    file.write_text(Entry(step=1, num_microbatches=32, windows=(7, 1)).to_line())
    options = parse(["step", "--replay", str(file)])
    assert options.replay == file
    text = site_toml(options, 0, folder=tmp_path, listen="127.0.0.1:0", dial=None)
    assert tomllib.loads(text)["run"]["plan"]["replay"] == str(file)


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
        ("--microbatches auto", "--microbatches auto needs --global-batch"),
        ("--microbatches auto --global-batch 8", "--microbatches auto needs --window auto"),
        ("--microbatches 16 --global-batch 8", "--microbatches cannot exceed --global-batch"),
        ("--sample-ms 3", "--sample-ms needs --global-batch"),
        ("--memory-samples 3", "--memory-samples needs --global-batch"),
        ("--global-batch 64 --memory-samples 0", "--memory-samples must be 1 or more"),
        ("--global-batch 64 --forward-ms 3", "with --global-batch give --overhead-ms"),
        ("--global-batch 64 --overhead-ms 1,2,3", "--overhead-ms needs one number, or one for"),
        ("--global-batch 64 --against torch", "leave out --global-batch"),
        ("--script none.toml", "cannot read the script none.toml"),
        ("--script none.toml --against torch", "leave out --script"),
        ("--replay none.jsonl", "cannot repeat the plans of none.jsonl"),
        ("--replay none.jsonl --window auto", "leave out --window"),
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
