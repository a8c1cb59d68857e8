"""Windows and counts that change while a run goes on: the same model comes out of it."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from auto_plan_rank import GLOBAL_BATCH, train
from harness import Regions, RunSpec

import geotrain
from geotrain.control.journal import Entry

HERE = Path(__file__).parent
LIMIT_S = 90.0
MOST_ATTEMPTS = 3
"""Other work on the machine really makes stages unequal, and then another count saves little."""
MOST_STEPS = 36
"""Within which the controller looks at counts four times."""
PLANS = ((1, 8, (8, 1)), (2, 16, (3, 1)), (4, 2, (2, 1)), (5, 5, (4, 1)), (7, 1, (1, 1)))
"""From which step on, how many microbatches, and the windows."""
REPEATED = RunSpec(
    global_batch=GLOBAL_BATCH,
    seed=0,
    extra={"steps": 8},
    plan={"replay": "plans.jsonl"},
)
AUTO = RunSpec(
    global_batch=GLOBAL_BATCH,
    seed=0,
    extra={"steps": MOST_STEPS},
    microbatches="auto",
    window="auto",
)


class Outcome:
    """What one run came to in both regions."""

    def __init__(self, files: Sequence[Path], log: str) -> None:
        first, second = (torch.load(file, weights_only=True) for file in files)
        assert first["counts"] == second["counts"]
        self.counts = first["counts"]
        self.parameters = first["parameters"] | second["parameters"]
        self.log = log

    @property
    def has_changed(self) -> bool:
        return len(set(self.counts)) > 1


def run(folder: Path, **specs: RunSpec) -> dict[str, Outcome]:
    """Runs of these kinds, one after another, in one process a region: its start takes longest."""
    deadline = time.monotonic() + LIMIT_S
    with ExitStack() as stack:
        lines = {
            kind: stack.enter_context(Regions(folder / kind, spec)) for kind, spec in specs.items()
        }
        if "repeated" in lines:
            entries = [Entry(step=s, num_microbatches=n, windows=w) for s, n, w in PLANS]
            journal = lines["repeated"].folder / "plans.jsonl"
            journal.write_text("".join(map(Entry.to_line, entries)))
        *_, last = lines.values()
        for name in last.spec.names:
            configs = [f"{kind}={line.rank_config(name)}" for kind, line in lines.items()]
            last.start_rank(name, HERE / "auto_plan_rank.py", name, str(folder), *configs)
        for line in lines.values():
            line.start_daemons()
        last.expect_success(deadline=deadline)
        log, names = last.ranks["r0"].output(), last.spec.names
    return {kind: Outcome([folder / f"{name}.{kind}.pt" for name in names], log) for kind in specs}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """One of each kind; and more of those that decide by themselves, until a count has changed."""
    found = [run(tmp_path_factory.mktemp("t"), repeated=REPEATED, auto=AUTO)]
    while not found[-1]["auto"].has_changed and len(found) < MOST_ATTEMPTS:
        found.append(run(tmp_path_factory.mktemp("t"), auto=AUTO))
    return found


def assert_trained_as_alone(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEOTRAIN_CONFIG", raising=False)
    expected, alone = train(geotrain.attach(), steps=len(outcome.counts))
    assert set(alone) == {1}
    assert outcome.parameters.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-5, atol=1e-6)


def test_counts_that_change_in_mid_run_leave_the_gradients_as_they_are(outcomes, monkeypatch):
    repeated = outcomes[0]["repeated"]
    assert repeated.counts == [8, 16, 16, 2, 5, 5, 1, 1]
    assert_trained_as_alone(repeated, monkeypatch)


def test_so_do_those_that_the_first_region_decides(outcomes, monkeypatch):
    for each in outcomes:
        assert_trained_as_alone(each["auto"], monkeypatch)


def test_a_count_that_saves_time_is_found(outcomes):
    newest = outcomes[-1]["auto"]
    assert newest.has_changed, f"nothing was changed: {newest.counts}\n{newest.log}"
    assert ": microbatches 8 -> " in newest.log
