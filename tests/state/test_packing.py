"""Any state_dict comes back with the types it had, through JSON text."""

import json
import math
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.errors import ConfigError
from geotrain.state.errors import CheckpointError
from geotrain.state.packing import pack_object, unpack_object


def through_json(value):
    tensors, node = pack_object(value, "state")
    return unpack_object(tensors, json.loads(json.dumps(node, allow_nan=False)))


def same(a, b) -> bool:
    """Equal in value and in type, all the way down; NaN equals NaN, 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary()
)
KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())


@given(
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_any_nesting_comes_back(value):
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        (0.9, 0.95),
        {0: "a", 1: {"b": (1,)}},
        {"$": "not a tag"},
        {"$": "tuple", "v": [1]},
        {True: 1, "True": 2},
        [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1 + 0.2],
        2**80,
        b"\0\xff",
        OrderedDict(b=1, a=2),
        Counter({30: 1, 80: 2}),
        np.float32(0.1),
        np.int64(-(2**63)),
        np.bool_(True),
        np.datetime64("2024-02-29"),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 3), np.float16),
        np.array(1.5),
        np.array(["ab", "c"]),
        torch.tensor(1.5),
        torch.arange(6, dtype=torch.int16).reshape(2, 3),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1)},
        {1: torch.ones(1), "1": torch.zeros(1)},
    ],
    ids=repr,
)
def test_values_that_json_lacks_come_back(value):
    assert same(through_json(value), value)


def test_random_generators_states_come_back():
    state = {
        "python": random.Random(1).getstate(),
        "numpy": np.random.RandomState(1).get_state(legacy=False),
        "torch": torch.Generator().manual_seed(1).get_state(),
    }
    restored = through_json(state)
    again = random.Random()
    again.setstate(restored["python"])
    assert again.random() == random.Random(1).random()
    numpy_again = np.random.RandomState()
    numpy_again.set_state(restored["numpy"])
    assert numpy_again.rand() == np.random.RandomState(1).rand()
    assert torch.equal(restored["torch"], state["torch"])


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[2, 2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            ],
            milestones=[2],
        ),
    ],
)
def test_schedulers_go_on_where_they_were(make):
    def scheduler_after(steps: int):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01)
        scheduler = make(optimizer)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return scheduler

    restored = scheduler_after(0)
    restored.load_state_dict(through_json(scheduler_after(3).state_dict()))
    assert same(restored.state_dict(), scheduler_after(3).state_dict())


def test_tensors_are_named_by_where_they_are():
    tensors, _ = pack_object({"a": [1, torch.ones(2)], 3: torch.ones(1)}, "loader")
    assert list(tensors) == ["loader/a/1", "loader/3"]


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"sampler": {"rng": [Opaque()]}}, r"loader/sampler/rng/0: a .*Opaque cannot be saved"),
        ({"seen": {1, 2}}, r"loader/seen: a builtins\.set cannot be saved"),
        ({"shape": torch.Size([1])}, r"loader/shape: a torch\.Size cannot be saved"),
        ({"x": np.array([object()])}, r"loader/x: a numpy value of dtype object"),
        ({"x": torch.ones(2).to_sparse()}, r"loader/x: a tensor of layout torch\.sparse_coo"),
        ({"f": 1j}, r"loader/f: a builtins\.complex cannot be saved"),
        ({frozenset(): 1}, r"loader \(a key\): a builtins\.frozenset cannot be saved"),
    ],
)
def test_anything_else_is_named_with_path_and_type(value, message):
    with pytest.raises(ConfigError, match=message):
        pack_object(value, "loader")


def test_a_lost_tensor_and_an_unknown_kind_are_named():
    _, node = pack_object([torch.ones(1)], "hook.0")
    with pytest.raises(CheckpointError, match=r'lacks the tensor "hook\.0/0"'):
        unpack_object({}, node)
    with pytest.raises(CheckpointError, match='unknown kind "set"; it was written by a newer'):
        unpack_object({}, {"$": "set", "v": []})
