import pytest
import torch
from torch import nn

from geotrain.errors import ConfigError
from geotrain.pipeline.segment import (
    Segment,
    Split,
    build_model,
    count_layers,
    describe,
    split_model,
)
from geotrain.pipeline.weights import init_weights, materialise, uninitialised


class Rotary(nn.Module):
    """A layer with a table computed in its constructor, as rotary embeddings have."""

    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.register_buffer("table", torch.arange(width) * 0.5, persistent=False)

    def forward(self, x):
        return self.proj(x) + self.table


class Model(nn.Module):
    def __init__(self, width=8, num_layers=5):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Rotary(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


SPLIT = Split("embed", "layers", ("norm", "head"))


def whole(seed=3):
    model = Model()
    init_weights(model, seed=seed)
    return model


def cut(ranges, seed=3):
    parts = []
    for index in range(len(ranges)):
        model = build_model(Model)
        part = split_model(model, SPLIT, ranges=ranges, index=index)
        materialise(part, device=torch.device("cpu"), dtype=torch.float32)
        assert uninitialised(part)
        init_weights(part, seed=seed)
        assert not uninitialised(part)
        parts.append(part)
    return parts


@pytest.mark.parametrize("ranges", [[(0, 5)], [(0, 2), (2, 5)], [(0, 1), (1, 2), (2, 4), (4, 5)]])
def test_any_split_has_the_weights_and_the_output_of_the_whole_model(ranges):
    parts = cut(ranges)
    merged = {name: value for part in parts for name, value in part.state_dict().items()}
    reference = whole()
    assert merged.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        assert torch.equal(merged[name], value), name
    x = tokens = torch.arange(6)
    for part in parts:
        x = part(x)
    assert torch.equal(x, reference(tokens))


def test_building_leaves_parameters_on_meta_and_buffers_real():
    model = build_model(Model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.layers[0].table.tolist() == Rotary(8).table.tolist()
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_sequential_needs_no_split():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    part = split_model(model, None, ranges=[(0, 2), (2, 3)], index=1)
    assert [name for name, _ in part.named_parameters()] == ["2.weight", "2.bias"]
    assert count_layers(model, None) == 3


def test_the_fingerprint_is_the_same_in_all_regions_and_differs_between_models():
    ranges = [(0, 2), (2, 5)]
    prints, indexes = set(), {}
    for index in range(2):
        model = build_model(Model)
        info = describe(model, split_model(model, SPLIT, ranges=ranges, index=index), SPLIT)
        prints.add(info.fingerprint)
        indexes |= info.parameter_index
    assert len(prints) == 1
    names = [name for name, _ in Model().named_parameters()]
    assert indexes == {name: position for position, name in enumerate(names)}
    other = build_model(lambda: Model(width=9))
    part = split_model(other, SPLIT, ranges=ranges, index=0)
    assert describe(other, part, SPLIT).fingerprint not in prints


def test_parameters_shared_inside_a_segment_stay_shared():
    def build():
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    part = split_model(build_model(build), None, ranges=[(0, 2)], index=0)
    materialise(part, device=torch.device("cpu"), dtype=torch.bfloat16)
    layers = [part.get_submodule("0"), part.get_submodule("1")]
    assert layers[0].weight is layers[1].weight
    assert layers[0].weight.dtype == torch.bfloat16


def test_a_module_that_stands_twice_runs_twice():
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 4))
    assert count_layers(model, None) == 5
    parts = [split_model(model, None, ranges=[(0, 2), (2, 5)], index=index) for index in (0, 1)]
    x = torch.randn(3, 4)
    assert torch.equal(parts[1](parts[0](x)), model(x))


def test_a_block_that_stands_thrice_runs_thrice():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            block = nn.Linear(4, 4)
            self.layers = nn.ModuleList([block, block, block])

    model = Repeated()
    part = split_model(model, Split("layers"), ranges=[(0, 3)], index=0)
    x = torch.randn(2, 4)
    expected = model.layers[0](model.layers[0](model.layers[0](x)))
    assert torch.equal(part(x), expected)
    assert describe(model, part, Split("layers")).parameter_index.keys() == {
        "layers.0.weight",
        "layers.0.bias",
    }


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("rotations", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("positions", torch.tensor([2999.0], dtype=torch.float64))

    def reset_parameters(self):
        nn.init.ones_(self.weight)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_buffers_keep_their_dtype_and_every_bit(dtype):
    segment = split_model(
        build_model(lambda: nn.Sequential(Tables())), None, ranges=[(0, 1)], index=0
    )
    materialise(segment, device=torch.device("cpu"), dtype=dtype)
    tables = segment.get_submodule("0")
    assert tables.weight.dtype == (dtype or torch.float32)
    assert torch.equal(tables.rotations, Tables().rotations)
    assert tables.positions.dtype == torch.float64 and tables.positions.item() == 2999.0


def test_a_shared_parameter_declared_first_elsewhere_is_found():
    class OutputFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.output = nn.Linear(8, 11, bias=False)
            self.embed = nn.Embedding(11, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8)])
            self.embed.weight = self.output.weight

    split = Split("embed", "layers", "output")
    model = build_model(OutputFirst)
    part = split_model(model, split, ranges=[(0, 1)], index=0)
    assert describe(model, part, split).parameter_index["embed.weight"] == 0


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight


class WithLooseParameter(Model):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class WithLooseModule(Model):
    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()


class WithLooseBuffer(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", torch.ones(2))


class OwnForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


def hooked():
    model = Model()
    model.register_forward_hook(lambda module, args, output: output * 2)
    return model


class ComputesWithParameters(Model):
    def __init__(self):
        super().__init__()
        self.total = float(self.head.weight.sum())


class BufferOfParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("doubled", self.weight.detach() * 2)


def test_a_buffer_made_of_a_parameter_without_values_is_refused():
    segment = Segment([("odd", build_model(BufferOfParameter))])
    with pytest.raises(ConfigError, match=r"buffer doubled of BufferOfParameter"):
        materialise(segment, device=torch.device("cpu"), dtype=None)


class Initless(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("model", "split", "ranges", "text"),
    [
        (Tied, SPLIT, [(0, 2), (2, 5)], "embed.weight and head.weight are one parameter"),
        (WithLooseParameter, SPLIT, [(0, 2), (2, 5)], "leaves out scale"),
        (Model, SPLIT, [(0, 2), (2, 4)], "end at 4, but the model has 5 layers"),
        (Model, SPLIT, [(0, 2), (2, 9)], "end at 9, but the model has 5 layers"),
        (Model, Split("embed", "layer", "head"), [(0, 5)], "no module 'layer'"),
        (Model, Split("embed", "head"), [(0, 5)], "exactly one name"),
        (Model, None, [(0, 5)], "needs split"),
        (Model, Split("embed", "layers"), [(0, 5)], "leaves out norm.weight"),
        (WithLooseModule, SPLIT, [(0, 5)], r"leaves out act \(Tanh\)"),
        (WithLooseBuffer, SPLIT, [(0, 5)], "leaves out freqs"),
        (OwnForward, None, [(0, 0)], "OwnForward needs split"),
        (hooked, SPLIT, [(0, 5)], "a forward hook of the whole model"),
        (ComputesWithParameters, SPLIT, [(0, 5)], "pass a built model instead"),
    ],
)
def test_splits_that_cannot_work_are_refused_by_name(model, split, ranges, text):
    with pytest.raises(ConfigError, match=text):
        split_model(build_model(model), split, ranges=ranges, index=0)


def test_a_module_without_reset_parameters_is_named_and_init_serves_it():
    segment = Segment([("odd", Initless())])
    with pytest.raises(ConfigError, match=r"odd \(Initless\) has no reset_parameters"):
        init_weights(segment, seed=0)
    init_weights(segment, seed=0, init=lambda module, name: nn.init.normal_(module.weight))
    assert segment.get_submodule("odd").weight.abs().sum() > 0


def test_initialising_leaves_the_callers_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    model = Model()
    torch.manual_seed(5)
    init_weights(model, seed=3)
    assert torch.equal(torch.rand(1), expected)


def test_a_callable_that_builds_no_module_is_refused():
    with pytest.raises(ConfigError, match="returned a int"):
        build_model(lambda: 3)
