"""A run survives what may be survived, and everything else ends it everywhere with one named error.

Starting a process costs more than a case does, so cases share daemons, and processes where they
can: `continuity_rank.py` runs several, one after another.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from continuity import (
    LIMIT_S,
    RANKS_WAIT_S,
    RelayThread,
    assert_daemons_up,
    assert_same_result,
    await_end,
    await_step,
    errors,
    link,
    records,
    run,
    start,
    wait_until,
    waits_for_others,
)
from harness import Regions, RunSpec

from geotrain.lab.settings import LinkSettings


@pytest.fixture(scope="module")
def relay():
    # A step of the case "cuts" then takes a tenth of a second, most of it in flight.
    thread = RelayThread(LinkSettings.from_round_trip(0.01, rate_bytes_per_s=20e6))
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory, relay):
    """Two regions, joined through the relay."""
    spec = RunSpec(arena_mib=1, codec="planes", silent_s=3.0, keeps_ports=True)
    with Regions(tmp_path_factory.mktemp("pair"), spec) as regions:
        regions.start_daemons(urls={"r1": f"http://127.0.0.1:{relay.port}"})
        host, _, port = regions.ports["r1"]["listen"].rpartition(":")
        relay.do(relay.relay.aim, host, int(port))
        yield regions


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    spec = RunSpec(regions=3, layers=4, arena_mib=1, silent_s=5.0)
    with Regions(tmp_path_factory.mktemp("three"), spec) as regions:
        regions.start_daemons()
        yield regions


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process computes for every case that is compared."""
    with Regions(tmp_path_factory.mktemp("alone"), RunSpec(regions=1)) as regions:
        start(regions, "uninterrupted", "large boundary", "cuts")
        yield regions


# ---- going on


@pytest.fixture(scope="module")
def trained(pair, alone, relay):
    """Cases in one set of processes: in one the link is cut and daemons are killed."""
    cases = ("saving", "stopping", "stopping in a commit", "large boundary", "cuts", "endless")
    start(pair, *cases)
    await_step(pair, "saving", 4)
    wait_until(lambda: waits_for_others(pair, "r1"), "r1 in its second case", pair)
    (pair.folder / "go on after 4").touch()
    for step, after_s in ((2, 0.0), (5, 0.02), (8, 0.045), (11, 0.07)):
        await_step(pair, "cuts", step)
        relay.do(relay.relay.cut, after_s=after_s)
        wait_until(lambda: link(pair, "r0", "r1")["state"] != "connected", "the cut", pair)
        relay.do(relay.relay.mend)
    await_step(pair, "cuts", 14)
    relay.do(relay.relay.stall, after_s=0.03)
    wait_until(lambda: link(pair, "r1", "r0")["state"] != "connected", "the stall", pair)
    relay.do(relay.relay.mend)
    for step, names in ((18, ["r0"]), (21, ["r1"]), (24, ["r0", "r1"]), (27, ["r1", "r0"])):
        await_step(pair, "cuts", step)
        for name in names:
            pair.kill_daemon(name)
        for name in reversed(names):
            pair.start_daemon(name)
    await_step(pair, "endless", 2)
    alone.expect_success(deadline=time.monotonic() + LIMIT_S)
    return pair


def test_a_region_that_starts_again_waits_for_one_that_is_still_in_the_run_before(trained):
    for case in ("saving", "stopping"):
        assert [record["error"] for record in records(trained, case)] == [None, None]


def test_a_stop_asked_for_in_the_last_region_stops_all_after_the_same_step(trained):
    for case, reason in (
        ("stopping", "r1: the loss is low enough"),
        ("stopping in a commit", "r1: interrupted"),
    ):
        found = records(trained, case)
        assert [record["error"] for record in found] == [None, None]
        assert [record["stop_reason"] for record in found] == [reason, reason]
        assert [record["steps"] for record in found] == [[1, 2, 3, 4]] * 2


def test_a_tensor_larger_than_the_arena_crosses_it_bit_equal(trained, alone):
    assert_same_result(records(trained, "large boundary"), records(alone, "large boundary"))


def test_cuts_a_stall_and_killed_daemons_change_nothing(trained, alone):
    assert trained.num_killed == {"r0": 3, "r1": 3}
    assert_same_result(records(trained, "cuts"), records(alone, "cuts"))


@pytest.fixture(scope="module")
def returned(trained):
    """What the other region says when a daemon comes back and its rank does not."""
    killed_at = time.time()
    trained.ranks["r1"].popen.send_signal(signal.SIGSTOP)  # it must not speak to the daemon
    trained.kill_daemon("r1")
    trained.ranks["r1"].popen.kill()
    trained.ranks["r1"].stop()
    trained.start_daemon("r1")
    await_end(trained, "r0")
    return errors(trained, "endless", since=killed_at)


@pytest.fixture(scope="module")
def resumed(trained, returned):
    """New processes, on daemons of which one is new too."""
    folder = trained.folder
    for copy in ("older", "damaged"):
        shutil.copytree(folder / "checkpoints", folder / copy)
    # As if an attempt that was given up had written it.
    meta = folder / "older" / "step-00000004" / "r1" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "attempt": 1}))
    [tensors] = (folder / "damaged" / "step-00000004" / "r1").glob("*.distcp")
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    names = ("resuming", "resuming an older step", "resuming a damaged step", "crash in r1")
    start(trained, *names)
    await_end(trained, "r1", status=1)
    await_end(trained, "r0")
    return trained


def test_new_processes_resume_bit_equal_to_an_uninterrupted_run(resumed, alone):
    assert [record["steps"] for record in records(resumed, "saving")] == [[1, 2, 3, 4]] * 2
    found = records(resumed, "resuming")
    assert [record["resumed"] for record in found] == [4, 4], found
    assert_same_result(found, records(alone, "uninterrupted"))


def test_of_the_checkpoints_as_many_are_kept_as_asked_for(resumed):
    steps = sorted(folder.name for folder in (resumed.folder / "checkpoints").iterdir())
    assert steps == ["step-00000002", "step-00000004"]


def test_regions_agree_on_the_newest_step_that_all_have_of_one_attempt(resumed, alone):
    found = records(resumed, "resuming an older step")
    assert [record["resumed"] for record in found] == [2, 2]
    assert_same_result(found, records(alone, "uninterrupted"))


# ---- ending with one name


def test_a_damaged_checkpoint_is_named_everywhere(resumed):
    first, second = (record["error"] for record in records(resumed, "resuming a damaged step"))
    assert first == second
    assert (first["region"], first["kind"]) == ("r1", "exception")
    assert "CheckpointError" in first["detail"]


def test_an_exception_between_steps_is_named(resumed):
    [record] = records(resumed, "crash in r1")
    assert (record["error"]["kind"], record["error"]["region"]) == ("exception", "r1")
    assert "ArithmeticError: the tracker gave up" in record["text"]
    assert_daemons_up(resumed)


def test_a_rank_that_died_with_its_daemon_is_named_once_the_daemon_is_back(returned):
    [error] = returned
    assert (error["kind"], error["region"]) == ("lost", "r1")
    assert "its training process did not come back" in error["detail"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A region leaves early, then the other; then a limit of money ends the run in order."""
    spec = RunSpec(egress_usd_per_gb=1000.0, egress_usd_per_day=0.2)
    with Regions(tmp_path_factory.mktemp("stopped"), spec) as regions:
        regions.start_daemons()
        run(regions, "left by r0", "left by r1", "endless")
        yield regions


@pytest.mark.parametrize(("index", "leaver"), [(0, "r0"), (1, "r1")])
def test_a_script_that_ends_early_is_named(stopped, index, leaver):
    found = records(stopped, f"left by {leaver}")
    assert found[index]["error"] is None
    error = found[1 - index]["error"]
    assert (error["kind"], error["region"]) == ("left", leaver)
    assert [record["steps"] for record in found] == [[1, 2, 3]] * 2


def test_the_daily_limit_of_egress_stops_all_after_the_same_step(stopped):
    first, second = records(stopped, "endless")
    assert first["error"] is None and second["error"] is None, (first, second)
    assert first["steps"] == second["steps"]
    assert first["stop_reason"] == second["stop_reason"]
    assert "limits.egress_usd_per_day = 0.2" in first["stop_reason"]


def test_a_killed_rank_is_named_everywhere(three):
    start(three, "endless")
    await_step(three, "endless", 2)
    killed_at = time.time()
    three.ranks["r1"].popen.kill()
    three.ranks["r1"].stop()
    await_end(three, "r0", "r2")
    first, last = errors(three, "endless", since=killed_at)
    assert first == last
    assert (first["kind"], first["region"]) == ("lost", "r1")
    assert_daemons_up(three)


ATTACH = """\
import sys, geotrain
for config in sys.argv[1:]:
    try:
        geotrain.attach(config, timeout_s=20.0)
    except geotrain.AttachError as error:
        print("refused:", error)
"""


def refused(*configs: Path) -> list[str]:
    """The one line that each attempt to attach came to."""
    command = [sys.executable, "-c", ATTACH, *map(str, configs)]
    lines = subprocess.check_output(command, text=True, timeout=LIMIT_S).splitlines()
    assert len(lines) == len(configs), lines
    return lines


def test_a_new_start_trains_whoever_else_would_attach_until_a_daemon_is_ended(three, tmp_path):
    start(three, "busy in r0")
    await_step(three, "busy in r0", 3)
    stranger = tmp_path / "stranger.toml"
    text = three.rank_config("r0").read_text()
    stranger.write_text(text.replace('[site]\nname = "r0"', '[site]\nname = "r1"'))
    second, foreign = refused(three.rank_config("r0"), stranger)
    assert f"rank 0 of region r0 is already attached (pid {three.ranks['r0'].pid})" in second
    assert "serves region r0, not r1" in foreign
    (three.folder / "go on after 3").touch()
    await_step(three, "busy in r0", 6)
    ended_at = time.time()
    three.daemons["r0"].popen.send_signal(signal.SIGTERM)
    assert three.daemons["r0"].wait(deadline=time.monotonic() + LIMIT_S) == 0
    (three.folder / "go on after 6").touch()  # r0 hears of it only now
    await_end(three, "r0", "r1", "r2")
    first, *others = errors(three, "busy in r0", since=ended_at)
    assert others == [first, first]
    assert (first["kind"], first["region"]) == ("daemon", "r0")
    assert "the daemon of region r0 was ended (SIGTERM)" in first["detail"]


def test_a_killed_daemon_that_stays_away_is_named_after_wait_s(tmp_path):
    spec = RunSpec(silent_s=4.0, wait_s=4.0)
    with Regions(tmp_path, spec) as regions:
        # A patient rank, so that it is its daemon that names the link.
        file = regions.rank_config("r1")
        file.write_text(file.read_text().replace("wait_s = 4.0", f"wait_s = {RANKS_WAIT_S}"))
        regions.start_daemons()
        start(regions, "endless")
        await_step(regions, "endless", 2)
        killed_at = time.time()
        regions.daemons["r0"].popen.kill()
        await_end(regions, "r0", "r1")
        first, second = errors(regions, "endless", since=killed_at)
        assert (first["kind"], first["region"]) == ("daemon", "r0")
        assert (second["kind"], second["region"]) == ("link", "r1")
        assert "the link to region r0 is down" in second["detail"]
