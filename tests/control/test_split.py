"""The split that is proposed where a region stays slow."""

import itertools
from random import Random

import pytest

from geotrain.control.split import GAIN, propose
from geotrain.pipeline.simulate import Boundary, Direction, PipelineModel, StageTimes, simulate


def line(*microbatch_s: float, one_way_s: float = 0.05) -> PipelineModel:
    way = Direction(latency_s=one_way_s, transfer_s=0.008)
    return PipelineModel(
        stages=[StageTimes(forward_s=[s / 3], backward_s=[2 * s / 3]) for s in microbatch_s],
        boundaries=[Boundary(forward=way, backward=way) for _ in microbatch_s[1:]],
    )


def step_s(model: PipelineModel, before, after) -> float:
    stages = [
        StageTimes(
            forward_s=[stage.forward_s[0] * new / old], backward_s=[stage.backward_s[0] * new / old]
        )
        for stage, new, old in zip(model.stages, after, before, strict=True)
    ]
    moved = PipelineModel(stages=stages, boundaries=model.boundaries)
    return simulate(moved, num_microbatches=16, windows=[16] * len(stages)).step_s


def test_layers_move_from_the_slow_region_to_its_neighbour():
    """One more than would even the stages out: the first one has no pipeline to wait for."""
    found = propose(line(0.06, 0.09), [6, 6], num_microbatches=16, windows=[16, 16])
    assert found is not None and found.num_layers == (8, 4)
    assert found.text(["virginia", "frankfurt"], [6, 6]).startswith(
        "with layers virginia 6 -> 8, frankfurt 6 -> 4 a step should take "
    )
    assert found.then_s < found.now_s


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (line(0.06, 0.06), [6, 6]),
        (line(0.06, 0.09), [1, 1]),
        (line(0.06), [4]),
        (line(0.06, 0.09), [4]),
        (line(0.06, 0.09), [4, 0]),
    ],
)
def test_where_nothing_is_to_be_gained_nothing_is_proposed(model, layers):
    count = [16] * len(model.stages)
    assert propose(model, layers, num_microbatches=16, windows=count) is None


def test_two_regions_get_the_best_split_there_is():
    rng = Random(2)
    for _ in range(40):
        layers = [rng.randint(2, 8), rng.randint(2, 8)]
        model = line(rng.uniform(0.03, 0.12), rng.uniform(0.03, 0.12))
        total = sum(layers)
        splits = [(first, total - first) for first in range(1, total)]
        best_s = min(step_s(model, layers, split) for split in splits)
        now_s = step_s(model, layers, layers)
        found = propose(model, layers, num_microbatches=16, windows=[16, 16])
        if found is None:
            assert best_s > now_s * (1 - GAIN) - 1e-9
        else:
            assert found.then_s == pytest.approx(best_s)
            assert found.now_s == pytest.approx(now_s)


def test_three_regions_come_close_to_the_best():
    rng = Random(3)
    for _ in range(10):
        layers = [4, 4, 4]
        model = line(*(rng.uniform(0.03, 0.09) for _ in layers))
        splits = [s for s in itertools.product(range(1, 11), repeat=3) if sum(s) == 12]
        best_s = min(step_s(model, layers, split) for split in splits)
        found = propose(model, layers, num_microbatches=16, windows=[16] * 3)
        then_s = found.then_s if found is not None else step_s(model, layers, layers)
        assert then_s <= best_s * 1.12
