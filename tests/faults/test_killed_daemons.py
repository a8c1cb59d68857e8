"""Daemons that are killed and started again, with real training on both sides: nothing changes."""

import os
import time
from random import Random

import pytest
from harness import Regions, RunSpec

IS_FULL = os.environ.get("FAULT_LENGTH") == "full"
SEEDS = range(int(os.environ.get("FAULT_SEEDS", "2")))
CASE = "cuts"
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not IS_FULL, reason="in short, test_continuity kills daemons already"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process computes."""
    from continuity import LIMIT_S, records, start

    with Regions(tmp_path_factory.mktemp("alone"), RunSpec(regions=1)) as regions:
        start(regions, CASE)
        regions.expect_success(deadline=time.monotonic() + LIMIT_S)
        yield records(regions, CASE)


@pytest.mark.parametrize("killed", [("r0",), ("r1",), ("r0", "r1")], ids=" and ".join)
@pytest.mark.parametrize("seed", SEEDS)
def test_sigkill(tmp_path, alone, killed, seed):
    from continuity import assert_same_result, await_end, await_step, records, start

    rng = Random(seed)
    with Regions(
        tmp_path, RunSpec(arena_mib=1, codec="planes", silent_s=3.0, wait_s=120.0, keeps_ports=True)
    ) as regions:
        regions.start_daemons()
        start(regions, CASE)
        for step in sorted(rng.sample(range(2, 28), 3)):
            await_step(regions, CASE, step)
            for name in killed:
                regions.kill_daemon(name)
            for name in rng.sample(killed, len(killed)):
                regions.start_daemon(name)
        await_end(regions, *regions.spec.names)
        assert_same_result(records(regions, CASE), alone)
