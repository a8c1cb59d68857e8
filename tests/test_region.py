"""The API in a run of one region: the same code as everywhere, without a daemon."""

import math
import time

import pytest
import torch
from torch import nn

import geotrain
from geotrain.errors import ConfigError, RegionError
from geotrain.pipeline.trace import busy_s


def build():
    return nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 13))


def loss_fn(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def batches(num, seed=0, size=6):
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 13, (size, 5), generator=generator) for _ in range(num)]
    return [(each, each.roll(1, 1)) for each in tokens]


@pytest.fixture
def region(monkeypatch):
    monkeypatch.delenv("GEOTRAIN_CONFIG", raising=False)
    return geotrain.attach()


class Average:
    """A hook with state, as an average of the weights has."""

    def __init__(self):
        self.calls = []

    def __call__(self, result):
        self.calls.append(result.step)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def make(region, *, hook=None, **options):
    segment = region.segment(build)
    region.init_weights(segment)
    optimizer = torch.optim.AdamW(segment.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    if hook is not None:
        region.on_commit(hook)
    pipeline = region.pipeline(
        segment, optimizer, loss_fn=options.pop("loss_fn", loss_fn), scheduler=scheduler, **options
    )
    return segment, pipeline


def test_alone_the_region_is_the_whole_run(region):
    assert region.solo and region.is_main and region.is_region_main and region.reads_data
    assert (region.index, region.num_regions, region.rank, region.world_size) == (0, 1, 0, 1)


def test_fit_trains_to_the_step_asked_for_and_reports(region):
    segment, pipeline = make(region, max_grad_norm=0.5)
    before = [parameter.detach().clone() for parameter in segment.parameters()]
    results = list(pipeline.fit(batches(9), steps=4))
    assert [result.step for result in results] == [1, 2, 3, 4]
    assert all(result.committed and math.isfinite(result.loss) for result in results)
    assert [result.lrs for result in results] == [(1e-2,), (1e-2,), (5e-3,), (5e-3,)]
    moved = [not torch.equal(a, b) for a, b in zip(before, segment.parameters(), strict=True)]
    assert all(moved)
    for result in results:
        assert sum(result.attribution_s.values()) == pytest.approx(result.step_s)
        assert result.metrics()["num_tokens"] == 30
        assert not any("trace" in name for name in result.metrics())


def test_a_step_says_what_ran_when(region):
    _, pipeline = make(region)
    before = time.monotonic()
    (result,) = pipeline.fit(batches(1))
    ran = [f"{action.kind}{action.microbatch}" for action in result.trace]
    assert ran == [f"{kind}{m}" for m in range(result.num_microbatches) for kind in "FB"]
    times = [t for action in result.trace for t in (action.begin_s, action.end_s)]
    times = [before, *times, time.monotonic()]
    assert times == sorted(times)
    spent_s = result.attribution_s["compute"] + result.attribution_s["coding"]
    assert busy_s(result.trace) == pytest.approx(spent_s)


def test_fit_ends_with_the_loader(region):
    _, pipeline = make(region)
    assert len(list(pipeline.fit(batches(3)))) == 3
    assert len(list(pipeline.fit(batches(2), steps=100))) == 2
    assert pipeline.step_count == 5


def test_request_stop_ends_after_the_step_in_which_it_is_asked(region):
    _, pipeline = make(region)
    steps = []
    for result in pipeline.fit(batches(9)):
        steps.append(result.step)
        if result.step == 2:
            pipeline.request_stop("enough")
    assert steps == [1, 2, 3]
    assert pipeline.stop_reason == "solo: enough"


def test_a_step_with_nan_is_skipped_and_consumes_its_batch(region):
    hook = Average()

    def sometimes_nan(output, targets):
        return loss_fn(output, targets) * (math.nan if targets[0, 0] == 7 else 1.0)

    segment, pipeline = make(region, hook=hook, loss_fn=sometimes_nan)
    data = batches(3)
    for index, (_, targets) in enumerate(data):
        targets[0, 0] = 7 if index == 1 else 1
    kept = []
    for result in pipeline.fit(data):
        kept.append([parameter.detach().clone() for parameter in segment.parameters()])
        assert result.committed == (result.step != 2)
    assert result.step == 3 and hook.calls == [1, 3]
    assert all(torch.equal(a, b) for a, b in zip(kept[0], kept[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(kept[1], kept[2], strict=True))


def test_a_batch_without_targets_is_skipped(region):
    _, pipeline = make(region)
    inputs, targets = batches(1)[0]
    result = pipeline.step((inputs, torch.full_like(targets, -100)))
    assert not result.committed and result.reason == "the batch has no targets"


def test_the_step_after_a_resume_is_the_same_bit_for_bit(region, tmp_path):
    hook = Average()
    segment, pipeline = make(region, hook=hook)
    for result in pipeline.fit(batches(8), steps=8):
        if result.step == 5:
            pipeline.save(tmp_path)
    expected = {name: value.clone() for name, value in segment.state_dict().items()}
    again_hook = Average()
    again, pipeline = make(geotrain.attach(), hook=again_hook)
    assert pipeline.resume(tmp_path, loader=batches(8)) == 5
    assert [result.step for result in pipeline.fit(batches(8), steps=8)] == [6, 7, 8]
    assert again_hook.calls == hook.calls == list(range(1, 9))
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_only_so_many_checkpoints_are_kept_as_asked_for(region, tmp_path):
    held = lambda: sorted(int(path.name[5:]) for path in tmp_path.iterdir())  # noqa: E731
    _, pipeline = make(region)
    for result in pipeline.fit(batches(5), steps=5):
        pipeline.save(tmp_path, keep=3 if result.step > 2 else None)
    assert held() == [3, 4, 5]
    _, again = make(region)
    assert again.resume(tmp_path, loader=batches(8)) == 5
    for _ in again.fit(batches(8), steps=6):
        again.save(tmp_path, keep=2)
    assert held() == [5, 6]
    _, other = make(region)  # has not resumed: those are none of its own
    for _ in other.fit(batches(8), steps=7):
        pass
    other.save(tmp_path, keep=2)
    assert held() == [5, 6, 7]


@pytest.mark.parametrize("keep", [1, 0, -1, True, 2.0, "2"])
def test_too_few_to_keep_is_refused_before_anything_is_written(region, tmp_path, keep):
    _, pipeline = make(region)
    with pytest.raises(RegionError, match=r"keep must be a whole number >= 2, or None .* \(got "):
        pipeline.save(tmp_path, keep=keep)
    assert list(tmp_path.iterdir()) == []


def test_resuming_from_nothing_starts_at_zero(region, tmp_path):
    _, pipeline = make(region)
    assert pipeline.resume(tmp_path / "absent") == 0
    assert pipeline.step_count == 0


def test_evaluation_changes_nothing_about_training(region):
    plain, pipeline = make(region)
    list(pipeline.fit(batches(4)))
    evaluated, pipeline = make(region)
    first = pipeline.evaluate(batches(2, seed=1))
    for _ in pipeline.fit(batches(4)):
        pipeline.evaluate(batches(3, seed=1), max_batches=2)
        assert evaluated.training
    last = pipeline.evaluate(batches(2, seed=1))
    assert (first.num_batches, first.num_tokens) == (2, 60)
    assert last.loss != first.loss
    for name, value in evaluated.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_a_model_given_ready_made_keeps_its_weights(region):
    model = build()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    segment = region.segment(model)
    assert all(torch.equal(v, expected[name]) for name, v in segment.state_dict().items())


def test_a_callable_split_cuts_anything(region):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Embedding(13, 8), nn.Linear(8, 13)

        def forward(self, x):
            return self.b(self.a(x))

    segment = region.segment(Odd, split=lambda model, region: model)
    region.init_weights(segment)
    optimizer = torch.optim.SGD(segment.parameters(), lr=0.1)
    pipeline = region.pipeline(segment, optimizer, loss_fn=loss_fn)
    assert [result.committed for result in pipeline.fit(batches(2))] == [True, True]


def test_the_mesh_is_the_regions_own(region):
    assert region.mesh.mesh_dim_names == ("replica",) and region.mesh.size() == 1
    region.close()


def test_several_optimizers_and_none(region):
    segment = region.segment(build)
    region.init_weights(segment)
    halves = list(segment.parameters())
    optimizers = [
        torch.optim.SGD(halves[:2], lr=0.1, momentum=0.9),
        torch.optim.AdamW(halves[2:], lr=0.2),
    ]
    result = region.pipeline(segment, optimizers, loss_fn=loss_fn).step(batches(1)[0])
    assert result.lrs == (0.1, 0.2)
    segment.requires_grad_(False)
    result = region.pipeline(segment, None, loss_fn=loss_fn).step(batches(1)[0])
    assert result.committed and result.grad_norm == 0.0 and result.lrs == ()


class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("no such expert")


def bad_loader():
    yield batches(1)[0]
    raise OSError("shard 7 is gone")


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        (lambda p: p.step(None), "batch", "step 1.*no batch was given, but region solo"),
        (lambda p: p.step(3), "batch", r"must be \(inputs, targets\), not a int"),
        (lambda p: p.step((torch.zeros(0, 5).long(),) * 2), "batch", "no samples"),
        (lambda p: p.step((torch.zeros(2, 5), torch.zeros(3, 5))), "batch", "disagree"),
        (lambda p: p.step((torch.zeros(2).long(), {"a": 1})), "targets", "num_targets"),
        (
            lambda p: p.step((torch.full((2, 5), 99), torch.zeros(2, 5).long())),
            "exception",
            "step 1, microbatch 0, forward 0F0 of step 1: IndexError",
        ),
        (lambda p: list(p.fit(None)), "batch", "needs a loader"),
        (lambda p: list(p.fit(bad_loader())), "exception", "step 2, loading.*shard 7 is gone"),
        (lambda p: p.evaluate(None), "batch", "needs a loader"),
    ],
)
def test_what_goes_wrong_is_one_error_with_its_place_and_ends_the_pipeline(
    region, what, kind, text
):
    _, pipeline = make(region)
    with pytest.raises(RegionError, match=text) as caught:
        what(pipeline)
    assert caught.value.kind == kind and caught.value.region == "solo"
    with pytest.raises(RegionError) as again:
        pipeline.step(batches(1)[0])
    assert again.value is caught.value


def test_a_failing_commit_poisons(region):
    def hook(result):
        raise RuntimeError("disk full")

    _, pipeline = make(region, hook=hook)
    with pytest.raises(RegionError, match="RuntimeError: disk full while committing") as caught:
        pipeline.step(batches(1)[0])
    assert caught.value.kind == "poisoned"


def test_a_wrong_target_count_is_named(region):
    counts = iter([30.0, 29.0])
    _, pipeline = make(region, num_targets=lambda targets: next(counts))
    with pytest.raises(RegionError, match="counts 29 targets, region solo announced 30"):
        pipeline.step(batches(1)[0])


def test_pipeline_refuses_what_cannot_train(region):
    segment = region.segment(build)
    optimizer = torch.optim.SGD(segment.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"0\.weight.*have no weights yet: call region\.init"):
        region.pipeline(segment, optimizer, loss_fn=loss_fn)
    with pytest.raises(ConfigError, match=r"must come from region\.segment"):
        region.pipeline(build(), optimizer, loss_fn=loss_fn)
    region.init_weights(segment)
    with pytest.raises(ConfigError, match='allowed are "sum" and "mean"'):
        region.pipeline(segment, optimizer, loss_fn=loss_fn, loss_reduction="avg")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm must be > 0"),
        ({"loss_fn": nn.CrossEntropyLoss(reduction="sum")}, 'has reduction="sum"'),
        ({"loss_fn": nn.CrossEntropyLoss(ignore_index=0)}, "ignores the label 0"),
        ({"loss_fn": nn.CrossEntropyLoss(weight=torch.ones(13))}, "weights of its targets"),
    ],
)
def test_settings_that_would_compute_something_else_are_refused(region, options, text):
    with pytest.raises(ConfigError, match=text):
        make(region, **options)


def test_what_would_fail_at_the_first_commit_is_refused_at_once(region):
    segment = region.segment(build)
    region.init_weights(segment)
    sgd = torch.optim.SGD(segment.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    with pytest.raises(ConfigError, match="LBFGS"):
        region.pipeline(segment, torch.optim.LBFGS(segment.parameters()), loss_fn=loss_fn)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        region.pipeline(segment, sgd, loss_fn=loss_fn, scheduler=plateau)
    sparse = region.segment(lambda: nn.Sequential(nn.Embedding(13, 13, sparse=True)))
    region.init_weights(sparse)
    with pytest.raises(ConfigError, match=r"0 \(Embedding\) makes sparse gradients"):
        region.pipeline(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1), loss_fn=loss_fn)


def test_a_part_that_the_user_keeps_in_evaluation_mode_stays_so(region):
    segment, pipeline = make(region)
    dropout = segment.get_submodule("2")
    dropout.eval()
    for _ in pipeline.fit(batches(2)):
        pipeline.evaluate(batches(1))
        assert segment.training and not dropout.training


def test_a_hook_may_come_late_and_stays_for_the_next_pipeline(region):
    hook = Average()
    _, pipeline = make(region)
    pipeline.step(batches(1)[0])
    region.on_commit(hook)
    pipeline.step(batches(1)[0])
    _, pipeline = make(region)
    pipeline.step(batches(1)[0])
    assert hook.calls == [2, 1]


def test_more_than_one_rank_is_refused_for_now(monkeypatch, tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(
        'version = 1\n[run]\nid = "t"\nglobal_batch = 8\n[[run.regions]]\nname = "a"\n'
        'layers = "0:4"\n[site]\nname = "a"\n'
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one rank in each region"):
        geotrain.attach(path)


def test_one_region_with_a_config_needs_no_daemon(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(
        'version = 1\n[run]\nid = "t"\nglobal_batch = 8\nsteps = 2\nprecision = "bf16"\n'
        "[run.plan]\nmicrobatches = 3\n"
        '[[run.regions]]\nname = "a"\nlayers = "0:4"\n[site]\nname = "a"\n'
    )
    threads = torch.get_num_threads()
    region = geotrain.attach(path)
    try:
        segment, pipeline = make(region)
        assert next(segment.parameters()).dtype == torch.bfloat16
        results = list(pipeline.fit(batches(5)))
        assert [result.num_microbatches for result in results] == [3, 3]
        assert torch.get_num_threads() == 1
        with pytest.raises(RegionError, match=r"9 samples, run\.global_batch is 8"):
            pipeline.step(batches(1, size=9)[0])
    finally:
        torch.set_num_threads(threads)


def test_what_has_no_room_in_memory_is_refused_before_it_runs(region, monkeypatch):
    monkeypatch.setattr("geotrain.pipeline.room.spare_bytes", lambda device: 100)
    segment, pipeline = make(region)
    before = {name: value.clone() for name, value in segment.state_dict().items()}
    with pytest.raises(geotrain.RegionError, match=r"needs .* of memory, more than 80% of .*; too"):
        next(iter(pipeline.fit(batches(1))))
    for name, value in segment.state_dict().items():
        assert torch.equal(value, before[name])
