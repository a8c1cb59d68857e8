"""What is off in a real run is named, in every region alike."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import Process, Regions, RunSpec
from verdicts_rank import GLOBAL_BATCH, SLOW_FROM, SLOW_UNTIL, STEPS

from geotrain.commands.status import fetch
from geotrain.config import load_config
from geotrain.lab.settings import LinkSettings
from geotrain.lab.wan import open_wan

HERE = Path(__file__).parent
LIMIT_S = 90.0
MOST_ATTEMPTS = 3
"""Other work on the machine really makes a stage slow for a while."""
NOTICED = 10
"""Steps within which something is named."""
LINK_FROM = 34
"""The step from which on the link is slow, or one of the next."""


def steps_of(rank: Process) -> list[dict[str, Any]]:
    """What it has told of its steps so far."""
    return [json.loads(line) for line in rank.lines() if line.startswith("{")]


def await_step(regions: Regions, number: int, deadline: float) -> int:
    """Wait until the first region has done this step. Returns the newest one."""
    while True:
        has_ended = (
            regions.ranks["r0"].popen.poll() is not None
        )  # before the last look at its lines
        done = steps_of(regions.ranks["r0"])
        if done and done[-1]["step"] >= number:
            return done[-1]["step"]
        assert not has_ended, regions.all_tails()
        assert time.monotonic() < deadline, regions.all_tails()
        time.sleep(0.01)


def named(step: dict[str, Any]) -> set[tuple[str, str]]:
    return {(each["kind"], each["where"]) for each in step["verdicts"]}


@dataclass(frozen=True)
class Run:
    """What two regions said of a run in which one stage, then one link was slow."""

    told: list[list[dict[str, Any]]]
    logs: list[str]
    status: Mapping[str, Any]

    def named_rightly(self) -> bool:
        by_step = {each["step"]: named(each) for each in self.told[0]}
        slow, late = ("compute", "r1"), ("link", "r0 -> r1")
        return (
            slow in by_step[SLOW_FROM + NOTICED]
            and ("compute", "r0") not in by_step[SLOW_FROM + NOTICED]
            and not any(kind == "link" for n in range(LINK_FROM) for kind, _ in by_step.get(n, ()))
            and slow not in by_step[LINK_FROM - 1]
            and late in by_step[STEPS]
            and ("link", "r1 -> r0") not in by_step[STEPS]
            and all(": over: compute in r1 1." in log for log in self.logs)
            and all(": link r0 -> r1 " in log for log in self.logs)
        )


def train(folder: Path) -> Run:
    link = LinkSettings.from_round_trip(0.08, rate_bytes_per_s=125e6)
    spec = RunSpec(microbatches=4, window=4, global_batch=GLOBAL_BATCH)
    with (
        open_wan("relay", sites=("r0", "r1"), link=link) as wan,
        Regions(folder, spec) as regions,
    ):
        deadline = time.monotonic() + LIMIT_S
        route = wan.route("r0", "r1", 0)
        for name in spec.names:
            regions.start_rank(name, HERE / "verdicts_rank.py", name)
        regions.start_daemons(urls={"r1": f"http://{route.host}:{route.port}"})
        wan.aim(route, int(regions.ports["r1"]["listen"].rpartition(":")[2]))
        slow_from = min(await_step(regions, LINK_FROM - 1, deadline) + 1, STEPS)
        wan.set(source="r0", target="r1", delay_s=0.15)
        await_step(regions, slow_from, deadline)
        status = fetch(load_config(regions.config("r0")))
        regions.expect_success(deadline=deadline)
        ranks = [regions.ranks[name] for name in spec.names]
    return Run([steps_of(rank) for rank in ranks], [rank.output() for rank in ranks], status)


def test_a_slowed_stage_and_a_slow_link_are_named_rightly_in_every_region(tmp_path):
    assert SLOW_UNTIL < LINK_FROM
    is_right = False
    for attempt in range(MOST_ATTEMPTS):
        run = train(tmp_path / str(attempt))
        first, second = run.told
        assert [each["step"] for each in first] == list(range(1, STEPS + 1))
        assert [named(each) for each in first] == [named(each) for each in second]
        for each in [*first, *second]:
            assert sum(each["attribution_s"].values()) == pytest.approx(each["step_s"], abs=1e-6)
        assert set(run.status["steps"]["regions_s"]) == {"r0", "r1"}
        assert run.status["steps"]["total_s"]["compute"] > 0.1
        is_right = is_right or run.named_rightly()
        if is_right:
            break
    assert is_right, [(each["step"], named(each)) for each in first if named(each)]
