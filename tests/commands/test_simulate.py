"""`geotrain simulate`: from a config file to a drawn step."""

import json

import pytest

from geotrain import cli

RUN = """
version = 1
[run]
id = "r"
global_batch = 64
[run.plan]
microbatches = 32
[[run.regions]]
name = "virginia"
layers = "0:8"
[[run.regions]]
name = "frankfurt"
layers = "8:16"
[site]
name = "virginia"
"""


@pytest.fixture
def simulate(tmp_path, capsys):
    """Call the command; returns (exit status, stdout, stderr)."""

    def call(*options: str, config: str = RUN):
        file = tmp_path / "site.toml"
        file.write_text(config)
        status = cli.main(["simulate", "--config", str(file), *options])
        return status, *capsys.readouterr()

    return call


def test_it_draws_the_step_and_says_what_it_takes(simulate):
    status, out, _ = simulate("--rtt-ms", "100", "--window", "hide")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "2 regions, 32 microbatches, windows 4,1"
    assert lines[2] == "step 2.097 s; ideal 2.097 s, lower bound 2.048 s"
    assert lines[4].startswith("virginia  ")
    assert lines[5].startswith("frankfurt ")
    assert max(map(len, lines)) <= 80


def test_the_classic_window_is_the_files_and_names_its_cause(simulate):
    _, out, _ = simulate("--rtt-ms", "200")
    assert "windows 2,1" in out
    heads = next(line for line in out.splitlines() if line.startswith("%")).split()
    shares = next(line for line in out.splitlines()[::-1] if line.startswith("frankfurt")).split()
    causes = {head: float(share) for head, share in zip(heads[2:9], shares[2:9], strict=True)}
    assert max(causes, key=causes.__getitem__) == "latency"


def test_the_windows_that_a_run_would_come_to(simulate):
    unequal = ("--forward-ms", "10,20", "--backward-ms", "20,40")
    _, given, _ = simulate(*unequal, "--window", "auto")
    _, found, _ = simulate(*unequal, config=RUN.replace("= 32", '= 32\nwindow = "auto"'))
    assert given == found
    assert "windows 2,1" not in found


def test_numbers_may_differ_from_region_to_region(simulate):
    options = ("--forward-ms", "10,20", "--backward-ms", "20,40", "--microbatches", "4")
    status, out, _ = simulate(*options, "--window", "3,1")
    assert status == 0
    assert "2 regions, 4 microbatches, windows 3,1" in out


def test_one_region_alone(simulate):
    config = RUN.replace('[[run.regions]]\nname = "frankfurt"\nlayers = "8:16"\n', "")
    status, out, _ = simulate(config=config)
    assert status == 0
    assert "step 1.920 s; ideal 1.920 s, lower bound 1.920 s" in out
    assert "links" not in out


def test_the_trace_is_what_perfetto_opens(simulate, tmp_path):
    file = tmp_path / "step.json"
    _, out, _ = simulate("--microbatches", "3", "--trace", str(file))
    assert f"{file}: open it at" in out
    events = json.loads(file.read_text())["traceEvents"]
    computed = [e["name"] for e in events if e.get("cat") in ("forward", "backward")]
    assert sorted(computed) == sorted(f"{s}{k}{m}" for s in (0, 1) for k in "FB" for m in range(3))
    assert {"0SEND_F0", "1RECV_F0", "1SEND_B2", "0RECV_B2"} <= {e["name"] for e in events}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rtt-ms", "1,2,3"], "--rtt-ms needs one number, or 1 (got 3)"),
        (["--mbit", "0"], "--mbit must be from 0.001 to 1e9"),
        (["--mbit", "nan"], "--mbit must be from 0.001 to 1e9"),
        (["--forward-ms", "fast"], "--forward-ms must be numbers such as"),
        (["--microbatches", "0"], "--microbatches must be from 1 to 4096 (got 0)"),
        (["--window", "wide"], "--window must be auto, classic, hide, one whole number or 2"),
        (["--window", "1,2,3"], "--window must be auto, classic, hide, one whole number or 2"),
        (["--window", "0"], "--window must be auto"),
        (["--trace", "/nowhere/at/all.json"], "--trace /nowhere/at/all.json: No such file"),
    ],
)
def test_what_cannot_be_is_one_line(simulate, options, message):
    status, _, err = simulate(*options)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


def test_plain_characters_where_the_terminal_has_no_others(simulate, monkeypatch):
    import sys

    monkeypatch.setattr(type(sys.stdout), "encoding", "ascii", raising=False)
    _, out, _ = simulate()
    assert "f forward  B backward  . idle" in out
    assert out.isascii()


def test_activations_are_those_of_the_most_microbatches_in_flight(simulate):
    _, out, _ = simulate("--window", "7,1", "--rtt-ms", "200", "--activation-mib", "100,50")
    assert out.splitlines()[-3:] == [
        "activations at most",
        "  virginia: 7 x 100 MiB = 700 MiB",
        "  frankfurt: 1 x 50 MiB = 50 MiB",
    ]
    status, _, error = simulate("--activation-mib", "1,2,3")
    assert status != 0 and "--activation-mib needs one number, or 2 (got 3)" in error
