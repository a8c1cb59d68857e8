"""After unpacking, the next optimizer step is the same to the last bit."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geotrain.errors import ConfigError
from geotrain.state.errors import CheckpointError
from geotrain.state.optimizer import pack_optimizer, unpack_optimizer

Make = Callable[[nn.Module], Optimizer]


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def train(module: nn.Module, optimizer: Optimizer, *, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(step)
        x = torch.randn(5, 3, dtype=next(module.parameters()).dtype)
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()


def bits(module: nn.Module) -> list[bytes]:
    return [
        bytes(p.detach().contiguous().view(-1).view(torch.uint8).tolist())
        for p in module.parameters()
    ]


def groups(module: nn.Module) -> list[dict[str, object]]:
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=1e-2, betas=(0.8, 0.95)),
    "adamw_single": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "adamw_amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
    "adamw_tensor_lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2)),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd_momentum": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
}


def moved(
    packed: tuple[dict[str, Tensor], dict[str, object]],
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """As after a checkpoint: other memory, JSON text in between."""
    tensors, extra = packed
    return {name: t.clone() for name, t in tensors.items()}, json.loads(json.dumps(extra))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_next_steps_are_bit_equal(make, dtype):
    straight = model(dtype)
    optimizer = make(straight)
    train(straight, optimizer, first=0, steps=2)
    weights = {name: t.clone() for name, t in straight.state_dict().items()}
    tensors, extra = moved(pack_optimizer(optimizer, names_of(straight), "optim.0"))
    train(straight, optimizer, first=2, steps=2)

    resumed = model(dtype)
    resumed.load_state_dict(weights)
    fresh = make(resumed)
    kept = {name: t.clone() for name, t in tensors.items()}
    unpack_optimizer(fresh, names_of(resumed), "optim.0", tensors, extra)
    train(resumed, fresh, first=2, steps=2)
    assert bits(resumed) == bits(straight)
    assert all(torch.equal(tensors[name], kept[name]) for name in kept), "training wrote into them"


def test_hyper_parameters_come_back_exactly():
    module = model()
    optimizer = OPTIMIZERS["adamw"](module)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.2
    optimizer.param_groups[1]["lr"] = float("inf")
    tensors, extra = moved(pack_optimizer(optimizer, names_of(module), "optim.0"))
    other = OPTIMIZERS["adamw"](module)
    unpack_optimizer(other, names_of(module), "optim.0", tensors, extra)
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert other.param_groups[0]["betas"] == (0.8, 0.95)


def test_tensors_are_named_by_parameter_and_key():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, first=0, steps=1)
    tensors, _ = pack_optimizer(optimizer, names_of(module), "optim.0")
    assert {n for n in tensors if n.startswith("optim.0/2.weight/")} == {
        "optim.0/2.weight/step",
        "optim.0/2.weight/exp_avg",
        "optim.0/2.weight/exp_avg_sq",
    }


def test_parameters_without_state_stay_without():
    module = model()
    module[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, first=0, steps=1)
    tensors, extra = moved(pack_optimizer(optimizer, names_of(module), "optim.0"))
    assert not any(name.startswith("optim.0/0.") for name in tensors)
    fresh = torch.optim.AdamW(module.parameters())
    unpack_optimizer(fresh, names_of(module), "optim.0", tensors, extra)
    assert set(fresh.state) == {p for p in module.parameters() if p.requires_grad}


def test_a_momentum_buffer_of_none_comes_back():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = None
    tensors, extra = moved(pack_optimizer(optimizer, names_of(module), "optim.0"))
    fresh = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    unpack_optimizer(fresh, names_of(module), "optim.0", tensors, extra)
    assert all(fresh.state[p] == {"momentum_buffer": None} for p in module.parameters())


def test_moments_wider_than_the_weights_keep_their_bits():
    module = model(torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, first=0, steps=1)
    for entry in optimizer.state.values():
        entry["exp_avg"] = torch.full_like(entry["exp_avg"], 0.1, dtype=torch.float32)
    tensors, extra = moved(pack_optimizer(optimizer, names_of(module), "optim.0"))
    fresh = torch.optim.AdamW(module.parameters())
    unpack_optimizer(fresh, names_of(module), "optim.0", tensors, extra)
    for parameter in module.parameters():
        loaded = fresh.state[parameter]["exp_avg"]
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, optimizer.state[parameter]["exp_avg"])


class Shared(torch.optim.SGD):
    """Keeps something that belongs to no parameter, as some optimizers do."""


def test_state_of_no_parameter_comes_back():
    module = model()
    optimizer = Shared(module.parameters(), lr=0.1)
    optimizer.state["shared"] = {"rounds": 3, "mean": torch.ones(2)}
    tensors, extra = moved(pack_optimizer(optimizer, names_of(module), "optim.0"))
    fresh = Shared(module.parameters(), lr=0.1)
    unpack_optimizer(fresh, names_of(module), "optim.0", tensors, extra)
    assert fresh.state["shared"]["rounds"] == 3
    assert torch.equal(fresh.state["shared"]["mean"], torch.ones(2))


def test_two_optimizers_do_not_mix():
    module = model()
    first = torch.optim.AdamW(module[0].parameters())
    second = torch.optim.AdamW([*module[1].parameters(), *module[2].parameters()])
    train(module, first, first=0, steps=1)
    second.step()
    one = pack_optimizer(first, names_of(module), "optim.1")
    ten = pack_optimizer(second, names_of(module), "optim.10")
    tensors = one[0] | ten[0]
    fresh = torch.optim.AdamW(module[0].parameters())
    unpack_optimizer(fresh, names_of(module), "optim.1", tensors, one[1])
    weight = module[0].weight
    assert torch.equal(fresh.state[weight]["exp_avg"], first.state[weight]["exp_avg"])


def test_a_parameter_of_another_model_is_refused():
    module = model()
    with pytest.raises(ConfigError, match=r"AdamW holds a parameter of shape \(4, 3\) that is not"):
        pack_optimizer(torch.optim.AdamW(module.parameters()), names_of(model()), "optim.0")


def packed_adamw() -> tuple[nn.Module, dict[str, Tensor], dict[str, object]]:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, first=0, steps=1)
    return module, *moved(pack_optimizer(optimizer, names_of(module), "optim.0"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda m: torch.optim.SGD(m.parameters()),
            "optim.0: the checkpoint was written with AdamW, this script uses SGD; use the same",
        ),
        (
            lambda m: torch.optim.AdamW(groups(m)),
            "has 1 parameter groups, this script's AdamW has 2; build the same groups",
        ),
        (
            lambda m: torch.optim.AdamW(m[0].parameters()),
            "group 0: only in the checkpoint: 1.bias, 1.weight, 2.bias and 1 more; resume with",
        ),
    ],
)
def test_another_optimizer_is_named(make, message):
    module, tensors, extra = packed_adamw()
    with pytest.raises(CheckpointError) as caught:
        unpack_optimizer(make(module), names_of(module), "optim.0", tensors, extra)
    assert message in str(caught.value)
