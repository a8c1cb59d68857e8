"""Plans noted down and repeated, in a run of one region: its counts set the rounding."""

import pytest
import torch
from torch import nn

import geotrain
from geotrain.control.journal import Entry, Journal
from geotrain.errors import RegionError

STEPS = 5


def config(folder, *, plan: str = "", site: str = ""):
    path = folder / "site.toml"
    path.write_text(
        f'version = 1\n[run]\nid = "t"\nglobal_batch = 8\nsteps = {STEPS}\n'
        f"[run.plan]\nmicrobatches = 2\n{plan}\n"
        '[[run.regions]]\nname = "a"\nlayers = "0:2"\n'
        f'[site]\nname = "a"\n{site}\n'
    )
    return path


def train(path) -> tuple[dict[str, torch.Tensor], list[int]]:
    threads = torch.get_num_threads()
    region = geotrain.attach(path)
    try:
        segment = region.segment(lambda: nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1)))
        region.init_weights(segment)
        optimizer = torch.optim.SGD(segment.parameters(), lr=0.1)
        pipeline = region.pipeline(segment, optimizer, loss_fn=nn.functional.mse_loss)
        rng = torch.Generator().manual_seed(1)
        batches = [(torch.randn(8, 4, generator=rng), torch.ones(8, 1)) for _ in range(STEPS)]
        counts = [result.num_microbatches for result in pipeline.fit(batches)]
        return dict(segment.state_dict()), counts
    finally:
        torch.set_num_threads(threads)


def journal(file, *plans: tuple[int, int]) -> None:
    lines = [Entry(step=s, num_microbatches=n, windows=(1,)).to_line() for s, n in plans]
    file.write_text("".join(lines))


def test_a_run_is_repeated_bit_for_bit_from_what_it_noted_down(tmp_path):
    journal(tmp_path / "first.jsonl", (1, 4), (3, 8))
    first = config(tmp_path, plan='replay = "first.jsonl"', site='plan_log = "noted.jsonl"')
    parameters, counts = train(first)
    assert counts == [4, 4, 8, 8, 8]
    noted = Journal.parse((tmp_path / "noted.jsonl").read_text())
    assert [noted.at(step).num_microbatches for step in range(1, 6)] == counts
    again, counts_again = train(config(tmp_path, plan='replay = "noted.jsonl"'))
    assert counts_again == counts
    assert all(torch.equal(parameters[name], again[name]) for name in parameters)


def test_a_plan_that_stays_is_noted_once_a_run(tmp_path):
    path = config(tmp_path, site='plan_log = "noted.jsonl"')
    for runs in (1, 2):
        train(path)
        lines = (tmp_path / "noted.jsonl").read_text().splitlines()
        assert len(lines) == runs
    assert Entry.from_line(lines[0]) == Entry(
        step=1, num_microbatches=2, windows=(1,), why="as the run began"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"run\.plan\.replay .*plans\.jsonl: No such file"),
        ("nonsense\n", r"run\.plan\.replay .*plans\.jsonl: line 1: "),
        ('{"step": 3, "num_microbatches": 2, "windows": [1]}', "has no plan of step 1 for 1 regio"),
        ('{"step": 1, "num_microbatches": 2, "windows": [2, 1]}', "no plan of step 1 for 1 regio"),
    ],
)
def test_what_cannot_be_repeated_is_one_error(tmp_path, text, message):
    if text is not None:
        (tmp_path / "plans.jsonl").write_text(text)
    with pytest.raises(RegionError, match=message):
        train(config(tmp_path, plan='replay = "plans.jsonl"'))


def test_a_log_that_cannot_be_written_is_one_error(tmp_path):
    path = config(tmp_path, site='plan_log = "no/such/folder/noted.jsonl"')
    with pytest.raises(RegionError, match=r"site\.plan_log .*: No such file"):
        train(path)
