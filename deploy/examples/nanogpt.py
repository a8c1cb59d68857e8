"""A small GPT in the manner of nanoGPT, cut over regions: what a real training script has.

Shows a model of one's own under geotrain.Split with its own initialisation, weight decay by groups,
a cosine schedule with warm-up, gradient clipping, evaluation on held-out text, checkpoints and
resuming (in the middle of the data too), and an orderly stop on SIGTERM, as batch systems send it.
It learns the source text of Python's standard library, byte by byte.

Alone, in this process and without any daemon; then the same, continued up to step 40:

    python deploy/examples/nanogpt.py --steps 20 --checkpoints checkpoints
    python deploy/examples/nanogpt.py --steps 40 --checkpoints checkpoints

Over the two regions of deploy/sites, at each site with its own file:

    geotrain run --config deploy/sites/virginia.toml -- \
        torchrun --standalone --nproc-per-node 1 deploy/examples/nanogpt.py --steps 2000

Unlike in nanoGPT, the embedding and the output head are two weights: a tied weight would have to
lie in one region. Shapes: B batch, T sequence, C width, H heads, D width of one head, V vocabulary.
"""

import argparse
import math
import signal
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import geotrain


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    num_layers: int = 4
    """What `layers` in run.regions counts."""
    num_heads: int = 4
    width: int = 64
    context: int = 64
    vocabulary: int = 256
    dropout: float = 0.0


class Embedding(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.dropout(self.token(tokens_BT) + self.position(positions_T))


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BTC.shape
        q_BHTD, k_BHTD, v_BHTD = (
            part.view(batch, length, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(x_BTC).split(width, dim=2)
        )
        mixed_BHTD = functional.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.projection(mixed_BHTD.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.projection = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.norm_1(x_BTC)))
        hidden = functional.gelu(self.up(self.norm_2(x_BTC)))
        return x_BTC + self.dropout(self.projection(hidden))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Never called by geotrain, which runs the Split's modules; for use once trained."""
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))


def initialise(module: nn.Module, name: str, *, num_layers: int) -> None:
    """GPT-2's weights: called for each module, with a seed of its own name."""
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()
        return
    std = 0.02
    if name.endswith("projection"):  # what is added to the residual stream, twice a block
        std /= math.sqrt(2 * num_layers)
    nn.init.normal_(module.weight, std=std)
    if getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)


def make_optimizer(segment: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Matrices decay, biases and norms do not. A region may have parameters of one kind only."""
    matrices = [p for p in segment.parameters() if p.dim() >= 2]
    others = [p for p in segment.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95))


def lr_factor(step: int, *, warmup: int, steps: int, floor: float = 0.1) -> float:
    """Linear up to 1, then a cosine down to `floor` at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def loss_sum(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum", ignore_index=-100
    )


def library_text(limit_bytes: int = 1 << 20) -> torch.Tensor:
    """The source of Python's standard library as bytes: text that every machine has."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


class RandomWindows:
    """Endless batches of random windows of a text; with its place, for checkpoints."""

    def __init__(self, text: torch.Tensor, *, batch: int, context: int, seed: int) -> None:
        self._text = text
        self._shape = batch, context
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        batch, context = self._shape
        last = self._text.numel() - context
        while True:
            starts_B1 = torch.randint(0, last, (batch, 1), generator=self._generator)
            window = self._text[starts_B1 + torch.arange(context + 1)].long()
            yield window[:, :-1], window[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=20, help="the step to reach, counted from the run's start")
    add("--batch", type=int, default=16, help="samples a step, at most run.global_batch")
    add("--lr", type=float, default=3e-3)
    add("--warmup", type=int, default=5, help="steps until the full learning rate")
    add("--dropout", type=float, default=0.0)
    add("--every", type=int, default=10, help="steps between evaluations and checkpoints")
    add("--checkpoints", type=Path, help="save here, and resume from here")
    return parser.parse_args()


def main() -> None:
    options = parse()
    config = GPTConfig(dropout=options.dropout)
    region = geotrain.attach()  # reads GEOTRAIN_CONFIG; without it: one process, no daemon
    segment = region.segment(
        lambda: GPT(config), split=geotrain.Split("embedding", "blocks", ("norm", "head"))
    )
    region.init_weights(
        segment, init=lambda module, name: initialise(module, name, num_layers=config.num_layers)
    )
    optimizer = make_optimizer(segment, lr=options.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, warmup=options.warmup, steps=options.steps)
    )
    pipeline = region.pipeline(
        segment,
        optimizer,
        loss_fn=loss_sum,
        loss_reduction="sum",
        scheduler=scheduler,
        max_grad_norm=1.0,
    )
    # In any region: all of them stop after the same step, and save below.
    signal.signal(signal.SIGTERM, lambda *_: pipeline.request_stop("SIGTERM"))

    loader = held_out = None
    if region.reads_data:  # only the first region needs the data
        text = library_text()
        cut = text.numel() * 9 // 10
        held_out = text[cut:]
        loader = RandomWindows(text[:cut], batch=options.batch, context=config.context, seed=0)
    if options.checkpoints is not None:
        step = pipeline.resume(options.checkpoints, loader=loader)
        if step and region.is_main:
            print(f"resumed after step {step}", flush=True)

    saved = pipeline.step_count
    for result in pipeline.fit(loader, steps=options.steps):
        if region.is_main:
            rate = result.metrics()["tokens_per_s"]
            print(
                f"step {result.step} loss {result.loss:.6f} norm {result.grad_norm:.4f} "
                f"lr {result.lrs[0]:.2e} tokens/s {rate:.0f}",
                flush=True,
            )
        if result.step % options.every:
            continue
        validation = None
        if held_out is not None:
            validation = RandomWindows(
                held_out, batch=options.batch, context=config.context, seed=1
            )
        report = pipeline.evaluate(validation, max_batches=4)
        if region.is_main:
            print(f"step {result.step} held-out loss {report.loss:.4f}", flush=True)
        if options.checkpoints is not None:
            pipeline.save(options.checkpoints)
            saved = result.step
    if pipeline.stop_reason and region.is_main:
        print(f"stopped after step {pipeline.step_count}: {pipeline.stop_reason}", flush=True)
    if options.checkpoints is not None and pipeline.step_count > saved:
        pipeline.save(options.checkpoints)


if __name__ == "__main__":
    main()
