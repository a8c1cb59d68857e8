"""The plain torch loop that the demo is compared with: one process, torch and nothing else.

It imports torch and the standard library only, so that it can be run and read on its own:

    python geotrain/lab/demo/plain.py --steps 30 --save parameters.pt

A run over several regions must end with exactly these parameters, bit for bit. The model, the data
and the loss defined here are also what the demo's own training script uses.

Shapes: B batch, T sequence, C width, H heads, D width of one head, V vocabulary.
"""

import argparse
import functools
import hashlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

IGNORED_LABEL = -100
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
TEXT_LIMIT_BYTES = 4 << 20
"""Enough that a short run never sees a line twice, and read in well under a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteConfig:
    """The size of the model; the defaults take about half a second a step on one core."""

    width: int = 128
    num_heads: int = 4
    num_layers: int = 6
    context: int = 128
    vocabulary: int = 256


class Attention(nn.Module):
    """Causal attention; positions enter as a rotation of queries and keys."""

    def __init__(self, config: ByteConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BTC.shape
        qkv = self.qkv(x_BTC).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTD = functional.scaled_dot_product_attention(
            _rotate(q_BHTD), _rotate(k_BHTD), v_BHTD, is_causal=True
        )
        out: torch.Tensor = self.out(mixed_BHTD.transpose(1, 2).reshape(batch, length, width))
        return out


def _rotate(x_BHTD: torch.Tensor) -> torch.Tensor:
    length, size = x_BHTD.shape[-2:]
    positions_T = torch.arange(length, device=x_BHTD.device, dtype=torch.float32)
    exponents = torch.arange(0, size, 2, device=x_BHTD.device, dtype=torch.float32) / size
    angles = torch.outer(positions_T, 10_000.0**-exponents)
    cos, sin = angles.cos().to(x_BHTD.dtype), angles.sin().to(x_BHTD.dtype)
    even, odd = x_BHTD[..., 0::2], x_BHTD[..., 1::2]
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ByteConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        out: torch.Tensor = x_BTC + self.down(functional.gelu(self.up(self.mlp_norm(x_BTC))))
        return out


class ByteTransformer(nn.Module):
    """A small language model over bytes."""

    def __init__(self, config: ByteConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.tok_embeddings(tokens_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        logits_BTV: torch.Tensor = self.output(self.norm(x_BTC))
        return logits_BTV


def init_weights(model: nn.Module, seed: int) -> None:
    """Give every module its weights from (seed, its name) alone, so that any split gets the same.

    Raises:
        ValueError: a module has parameters of its own and no `reset_parameters`.
    """
    for name, module in model.named_modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
            reset()
        elif next(module.parameters(recurse=False), None) is not None:
            raise ValueError(f"module {name!r} has parameters but no reset_parameters()")


@functools.cache
def library_text() -> torch.Tensor:
    """The source text of Python's standard library as bytes, at most `TEXT_LIMIT_BYTES` of it."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_LIMIT_BYTES:
            break
    if len(text) < 1 << 16:
        raise FileNotFoundError(
            f"no source text of the standard library in {sysconfig.get_path('stdlib')}"
        )
    return torch.frombuffer(text[:TEXT_LIMIT_BYTES], dtype=torch.uint8)


def batch_of(
    *, seed: int, step: int, batch: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (B, T) of one step: a pure function of the seed and the step."""
    text = library_text()
    digest = hashlib.sha256(f"{seed}/batch/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    starts_B = torch.randint(0, text.numel() - context - 1, (batch, 1), generator=generator)
    window = text[starts_B + torch.arange(context + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def batches(
    *, seed: int, steps: int, batch: int, context: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of steps 0 to steps - 1."""
    for step in range(steps):
        yield batch_of(seed=seed, step=step, batch=batch, context=context)


def loss_sum(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The summed cross entropy over the labels that are not ignored."""
    return functional.cross_entropy(
        logits_BTV.flatten(0, 1),
        targets_BT.flatten(),
        reduction="sum",
        ignore_index=IGNORED_LABEL,
    )


def train(
    config: ByteConfig,
    *,
    seed: int,
    steps: int,
    batch: int,
    num_microbatches: int,
    step_s: list[float] | None = None,
) -> ByteTransformer:
    """Train in this process, with one thread: the reference.

    Args:
        step_s: Where the wall time of each step is appended.
    """
    torch.set_num_threads(1)
    model = ByteTransformer(config)
    init_weights(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    began = time.perf_counter()
    for inputs_BT, targets_BT in batches(
        seed=seed, steps=steps, batch=batch, context=config.context
    ):
        num_targets = int((targets_BT != IGNORED_LABEL).sum())
        parts = min(num_microbatches, inputs_BT.shape[0])
        optimizer.zero_grad()
        # tensor_split: sizes differ by at most one, the larger first.
        for tokens_bT, labels_bT in zip(
            inputs_BT.tensor_split(parts), targets_BT.tensor_split(parts), strict=True
        ):
            loss = loss_sum(model(tokens_bT), labels_bT) / num_targets
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if step_s is not None:
            step_s.append(time.perf_counter() - began)
        began = time.perf_counter()
    return model


def max_abs_difference(model: nn.Module, paths: Sequence[Path]) -> float | None:
    """The largest difference between the model and saved segments; None when one is not a number.

    Raises:
        ValueError: the segments together do not hold exactly the model's parameters.
    """
    saved: dict[str, torch.Tensor] = {}
    for path in paths:
        saved.update(torch.load(path, weights_only=True))
    own = model.state_dict()
    if saved.keys() != own.keys():
        differing = sorted(saved.keys() ^ own.keys())
        raise ValueError(f"parameters in one of the two only: {', '.join(differing)}")
    largest = 0.0
    for name, value in own.items():
        difference = float((value.double() - saved[name].double()).abs().max())
        if not math.isfinite(difference):
            return None
        largest = max(largest, difference)
    return largest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=ByteConfig().num_layers)
    parser.add_argument("--save", type=Path, help="write the parameters to this file")
    parser.add_argument("--compare", type=Path, nargs="*", help="segments saved by the regions")
    parser.add_argument("--times", action="store_true", help="print the seconds of each step")
    options = parser.parse_args(argv)
    step_s: list[float] = []
    model = train(
        ByteConfig(num_layers=options.layers),
        seed=options.seed,
        steps=options.steps,
        batch=options.batch,
        num_microbatches=options.microbatches,
        step_s=step_s,
    )
    if options.save is not None:
        torch.save(model.state_dict(), options.save)
    answer: dict[str, object] = {"step_s": step_s} if options.times else {}
    if options.compare:
        answer["max_abs_param_diff"] = max_abs_difference(model, options.compare)
    if answer:
        print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
