"""Windows and counts that change while a run goes on: the same model comes out of it."""

from pathlib import Path

import torch
from auto_plan_rank import GLOBAL_BATCH, STEPS, train
from harness import Regions, RunSpec

import geotrain

HERE = Path(__file__).parent
LIMIT_S = 90.0


def test_a_count_that_changes_in_mid_run_leaves_the_gradients_as_they_are(tmp_path, monkeypatch):
    spec = RunSpec(microbatches="auto", window="auto", global_batch=GLOBAL_BATCH, seed=0, layers=4)
    with Regions(tmp_path, spec) as regions:
        regions.run(HERE / "auto_plan_rank.py", str(tmp_path), limit_s=LIMIT_S)
        told = regions.ranks["r0"].output()
    found = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in spec.names]
    counts = found[0]["counts"]
    assert found[1]["counts"] == counts
    assert len(counts) == STEPS
    assert len(set(counts)) > 1, f"nothing was changed: {counts}\n{told}"
    assert ": microbatches 8 -> " in told
    monkeypatch.delenv("GEOTRAIN_CONFIG", raising=False)
    expected, alone = train(geotrain.attach())
    assert set(alone) == {1}
    parameters = found[0]["parameters"] | found[1]["parameters"]
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)
