"""A daemon that is killed and started again, with real training on both sides of it.

Today the run ends with one named error in every region. Once daemons may come back, set
RUN_GOES_ON, and the same faults must leave results bit-equal to one process's.
"""

import itertools
import os
import time
from random import Random

import pytest
from harness import Regions, RunSpec

RUN_GOES_ON = False
IS_FULL = os.environ.get("FAULT_LENGTH") == "full"
SEEDS = range(int(os.environ.get("FAULT_SEEDS", "2")))
CASE = "cuts"
WITHIN_S = 30.0
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (IS_FULL or RUN_GOES_ON), reason="in short, test_continuity kills a daemon already"
    ),
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
    from continuity import assert_same_result, await_end, await_step, errors, records, start

    rng = Random(seed)
    with Regions(tmp_path, RunSpec(arena_mib=1, codec="planes", silent_s=3.0)) as regions:
        regions.start_daemons()
        start(regions, CASE)
        await_step(regions, CASE, rng.randint(2, 8))
        killed_at = time.time()
        for name in killed:
            regions.daemons[name].popen.kill()
            regions.daemons[name].stop()
        for name in killed:
            file, address = regions.config(name), regions.ports[name]["listen"]
            file.write_text(file.read_text().replace("127.0.0.1:0", address, 1))
            regions.start_daemon(name)
        await_end(regions, *regions.spec.names)
        if RUN_GOES_ON:
            assert_same_result(records(regions, CASE), alone)
            return
        found = errors(regions, CASE, since=killed_at, within_s=WITHIN_S)
        assert len(found) == 2
        for record, name in itertools.product(found, killed[:1]):
            assert record["kind"] in ("daemon", "restarted"), record
            assert len(killed) == 2 or name in record["region"] + record["detail"], record
