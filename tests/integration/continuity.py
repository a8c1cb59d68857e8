"""What the continuity suite does with its regions: start cases, wait, read what came of them."""

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Regions

from geotrain.lab.emulator.relay import Relay
from geotrain.lab.settings import LinkSettings

SCRIPT = Path(__file__).with_name("continuity_rank.py")
LIMIT_S = 90.0
RANKS_WAIT_S = 30.0
"""liveness.wait_s of the ranks; they name what does not come five seconds after it."""


class RelayThread:
    """A relay on a thread of its own, told what to do by the tests' thread."""

    def __init__(self, settings: LinkSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.relay = Relay(settings)
        self.port = self._run(self.relay.start())

    def do(self, act: Callable[..., Any], *args: Any, after_s: float = 0.0) -> None:
        async def call() -> None:
            await asyncio.sleep(after_s)
            act(*args)

        self._run(call())

    def close(self) -> None:
        self._run(self.relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)


def start(regions: Regions, *cases: str) -> None:
    for name in regions.spec.names:
        for case in cases:
            (regions.folder / f"{name}.{case}.pt").unlink(missing_ok=True)
        regions.start_rank(name, SCRIPT, name, str(regions.folder), *cases)


def run(regions: Regions, *cases: str) -> None:
    start(regions, *cases)
    regions.expect_success(deadline=time.monotonic() + LIMIT_S)


def records(regions: Regions, case: str) -> list[dict[str, Any]]:
    """What the case came to in each region that still lived to tell."""
    paths = [regions.folder / f"{name}.{case}.pt" for name in regions.spec.names]
    return [torch.load(path) for path in paths if path.exists()]


def wait_until(condition: Callable[[], bool], what: str, regions: Regions) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}\n{regions.all_tails()}"
        time.sleep(0.01)


def await_step(regions: Regions, case: str, step: int) -> None:
    line = f"{case}: step {step} done\n"
    for rank in regions.ranks.values():
        wait_until(
            lambda rank=rank: line in rank.output() or rank.popen.poll() is not None,
            f"step {step} of the {rank.name}",
            regions,
        )
        assert line in rank.output(), f"{rank.name} ended:\n{regions.all_tails()}"


def await_end(regions: Regions, *names: str, status: int = 0) -> None:
    deadline = time.monotonic() + LIMIT_S
    for name in names:
        found = regions.ranks[name].wait(deadline=deadline)
        assert found == status, f"rank of {name} ended with {found}:\n{regions.all_tails()}"


def errors(regions: Regions, case: str, *, since: float) -> list[dict[str, Any]]:
    """What ended the case in each region, before a rank's own wait for its neighbours would."""
    found = records(regions, case)
    for record in found:
        assert record["error"] is not None, f"somebody ended well:\n{regions.all_tails()}"
        assert record["ended_at"] - since < RANKS_WAIT_S, record["text"]
    return [record["error"] for record in found]


def status(regions: Regions, region: str) -> dict[str, Any]:
    url = f"http://{regions.ports[region]['status']}/status"
    with urllib.request.urlopen(url, timeout=LIMIT_S) as response:
        return json.load(response)


def link(regions: Regions, region: str, peer: str) -> dict[str, Any]:
    return status(regions, region)["links"][peer]


def waits_for_others(regions: Regions, region: str) -> bool:
    actions = [rank["action"] for rank in status(regions, region)["ranks"]]
    return actions == ["waiting for all regions to be ready"]


def assert_same_result(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """All parameters and their averages, bit for bit."""
    [whole] = expected
    for record in found:
        assert record["error"] is None, record["text"]
        assert record["average"]["num_steps"] == whole["average"]["num_steps"]
    for values in (lambda r: r["parameters"], lambda r: r["average"]["weights"]):
        joined = {name: value for record in found for name, value in values(record).items()}
        assert joined.keys() == values(whole).keys()
        differing = [n for n, value in values(whole).items() if not torch.equal(value, joined[n])]
        assert not differing


def assert_daemons_up(regions: Regions) -> None:
    assert all(daemon.popen.poll() is None for daemon in regions.daemons.values())
