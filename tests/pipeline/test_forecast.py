"""What a stage needs in memory, against what it really takes."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from geotrain.errors import RegionError
from geotrain.pipeline import room as room_module
from geotrain.pipeline.forecast import (
    Forecast,
    gradient_bytes,
    optimizer_bytes,
    size_text,
    state_bytes,
    tensor_bytes,
)
from geotrain.pipeline.memory import ActivationMeter
from geotrain.pipeline.room import Room

CPU = torch.device("cpu")
WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH, BATCH = 64, 4, 176, 300, 48, 4


class Block(nn.Module):
    """A layer as Llama has it: RMSNorm, rotary attention, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        angles = torch.arange(LENGTH)[:, None] / 100 ** torch.linspace(0, 1, WIDTH // HEADS // 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self._attend(self.attention_norm(x_BTC))
        y_BTC = self.feed_norm(x_BTC)
        return x_BTC + self.down(functional.silu(self.gate(y_BTC)) * self.up(y_BTC))

    def _attend(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        q, k, v = (
            part.view(B, T, HEADS, C // HEADS).transpose(1, 2)
            for part in self.qkv(x_BTC).chunk(3, dim=-1)
        )
        found = functional.scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, is_causal=True
        )
        return self.out(found.transpose(1, 2).reshape(B, T, C))

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat(
            (even * self.cos - odd * self.sin, even * self.sin + odd * self.cos), dim=-1
        )


def stage_of(index: int) -> nn.Sequential:
    """The first, a middle or the last of three stages."""
    parts: list[nn.Module] = [Block(), Block()]
    if index == 0:
        parts.insert(0, nn.Embedding(VOCABULARY, WIDTH))
    if index == 2:
        parts += [nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)]
    return nn.Sequential(*parts)


def input_of(index: int) -> torch.Tensor:
    if index == 0:
        return torch.randint(VOCABULARY, (BATCH, LENGTH))
    return torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)


def loss_of(index: int, output: torch.Tensor) -> torch.Tensor:
    if index < 2:
        return output
    return functional.cross_entropy(output.flatten(0, 1), torch.zeros(BATCH * LENGTH).long())


@pytest.mark.parametrize("index", range(3))
def test_parameters_gradients_and_adam_are_exact_for_three_llama_like_stages(index):
    torch.manual_seed(0)
    stage = stage_of(index)
    adam = optim.AdamW(stage.parameters(), lr=1e-3)
    parameters = tensor_bytes(stage.parameters())
    forecast = (gradient_bytes(stage.parameters()), optimizer_bytes([adam]))
    loss_of(index, stage(input_of(index))).sum().backward()
    adam.step()
    assert parameters == sum(p.untyped_storage().nbytes() for p in stage.parameters())
    gradients = [p.grad.untyped_storage().nbytes() for p in stage.parameters()]
    state = [
        value.untyped_storage().nbytes() for each in adam.state.values() for value in each.values()
    ]
    assert forecast == (sum(gradients), sum(state))
    assert optimizer_bytes([adam]) == state_bytes([adam]) == sum(state)


def allocated_bytes(index: int, stage: nn.Module) -> int:
    """What a forward takes from the allocator and does not give back, by torch's own profiler."""
    x = input_of(index)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = loss_of(index, stage(x))
    found = sum(event.self_cpu_memory_usage for event in profiler.events())
    kept.sum().backward()
    return found + (x.numel() * x.element_size() if x.requires_grad else 0)


@pytest.mark.parametrize("index", range(3))
def test_activations_are_within_10_percent_for_three_llama_like_stages(index):
    torch.manual_seed(0)
    stage = stage_of(index)
    meter = ActivationMeter([*stage.parameters(), *stage.buffers()], device=CPU)
    allocated_bytes(index, stage)  # the first one also makes what stays
    with meter.measuring():
        kept = loss_of(index, stage(input_of(index)))
    kept.sum().backward()
    assert meter.largest_bytes == pytest.approx(allocated_bytes(index, stage), rel=0.1)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (optim.SGD, {}),
        (optim.SGD, {"momentum": 0.9}),
        (optim.Adam, {}),
        (optim.Adam, {"amsgrad": True}),
        (optim.AdamW, {"fused": True}),
        (optim.NAdam, {}),
        (optim.RAdam, {}),
        (optim.Adamax, {}),
        (optim.Adadelta, {}),
        (optim.Rprop, {}),
        (optim.ASGD, {}),
        (optim.RMSprop, {}),
        (optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (optim.Adagrad, {}),
    ],
)
def test_every_optimizer_of_torch_is_exact_before_its_first_step(kind, settings):
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    model[1].bias.requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    forecast = optimizer_bytes([optimizer])
    model(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    assert forecast == state_bytes([optimizer])


def test_an_optimizer_of_ones_own_is_known_after_its_first_step():
    class Own(optim.SGD):
        pass

    model = nn.Linear(4, 4)
    optimizer = Own(model.parameters(), lr=0.1, momentum=0.9)
    assert optimizer_bytes([optimizer]) is None
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer_bytes([optimizer]) == 4 * 20


FITS = Forecast(
    parameters=100 << 20,
    gradients=100 << 20,
    optimizer=200 << 20,
    activations=50 << 20,
    in_flight=6,
    arena=100 << 20,
)


def test_a_plan_at_81_percent_is_refused_with_the_term_that_is_too_large():
    assert FITS.total == 800 << 20
    assert FITS.refusal(math.ceil(FITS.total / 0.80)) == ""
    text = FITS.refusal(int(FITS.total / 0.81))
    assert "too large: activations of 6 microbatches in flight (315 MB)" in text
    assert "There is room for 5 in flight: lower run.plan.window, set site.limits" in text


@pytest.mark.parametrize(
    ("change", "named", "remedy"),
    [
        ({"optimizer": 5 << 30}, "optimizer state (5.37 GB)", "fewer layers"),
        ({"arena": 5 << 30}, "arena (5.37 GB)", "Lower site.arena_mib"),
        ({"activations": 5 << 30, "in_flight": 1}, "activations of 1 ", "Raise run.plan.microb"),
    ],
)
def test_the_largest_term_is_named_with_a_remedy(change, named, remedy):
    values = {name: getattr(FITS, name) for name in FITS.__slots__} | change
    text = Forecast(**values).refusal(1 << 30)
    assert f"too large: {named}" in text and remedy in text
    assert [size_text(n) for n in (900, 2_500_000, 1_250_000_000)] == ["1 kB", "2 MB", "1.25 GB"]


def room_for(spare: int, monkeypatch, *, meter: ActivationMeter | None = None) -> Room:
    """A region with one layer of 4 KiB, on a device that has so much to spare."""
    monkeypatch.setattr(room_module, "spare_bytes", lambda device: spare)
    segment = nn.Linear(1024, 1, bias=False)
    place = SimpleNamespace(device=CPU, arena_bytes=0)

    def error(kind: str, detail: str) -> RegionError:
        return RegionError(region="virginia", kind=kind, detail=detail)

    context = SimpleNamespace(place=place, parts=SimpleNamespace(segment=segment), error=error)
    stage = SimpleNamespace(meter=meter)
    room = Room(context, stage, [optim.SGD(segment.parameters(), lr=0.1)])  # type: ignore[arg-type]
    room.stage = stage  # type: ignore[attr-defined]
    return room


def opening(window: int = 4, count: int = 8):
    return SimpleNamespace(work=SimpleNamespace(window=window, num_microbatches=count))


def measured(room: Room, kept: int) -> None:
    room._meter.largest_bytes = max(room._meter.largest_bytes, kept)


def test_a_step_without_room_is_refused_before_it_runs(monkeypatch):
    room = room_for(1 << 20, monkeypatch)
    room.check(opening())
    measured(room, 150_000)
    room.check(opening())
    assert room.terms["activations of 4 microbatches in flight"] == 600_000
    with pytest.raises(RegionError, match="too large: activations of 7 microbatches") as caught:
        room.check(opening(window=7))
    assert caught.value.kind == "memory"


def test_parameters_alone_may_be_too_much(monkeypatch):
    with pytest.raises(RegionError, match="too large: parameters"):
        room_for(1000, monkeypatch).check(opening())


def test_automatic_windows_are_bounded_elsewhere(monkeypatch):
    room = room_for(1 << 20, monkeypatch, meter=ActivationMeter([], device=CPU))
    measured(room, 1 << 30)
    room.check(opening())
    assert room.terms["activations of 4 microbatches in flight"] == 4 << 30


def test_measuring_ends_after_the_first_steps_and_what_was_found_stays(monkeypatch):
    room = room_for(1 << 30, monkeypatch)
    for _ in range(21):
        assert room.stage.meter is room._meter
        room.check(opening())
        measured(room, 1000)
    assert room.stage.meter is None
    room.check(opening(window=5))
    assert room.terms["activations of 5 microbatches in flight"] == 5000


def test_a_system_that_says_nothing_refuses_nothing(monkeypatch):
    room_for(None, monkeypatch).check(opening(window=10**9))  # type: ignore[arg-type]
