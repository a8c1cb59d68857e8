"""The cases of the parity suite, in plain torch: shared by the reference and by the regions.

Batches, models and optimizers are pure functions of the case, so every process has the same ones.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import parity_models as models
import torch
from torch import nn
from torch.nn import functional

STEPS = 5
SEED = 11
GLOBAL_BATCH = 24
IGNORED = -100

Named = Iterable[tuple[str, nn.Parameter]]
Batch = tuple[Any, Any]


def plain_adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=3e-3)


def adamw_with_decay_groups(named: Named) -> torch.optim.Optimizer:
    """Decay on matrices only, and a slower embedding: by the names of the whole model."""
    named = list(named)
    embedding = [p for name, p in named if name.startswith("first.")]
    rest = [p for name, p in named if not name.startswith("first.")]
    return torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.2},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
            {"params": embedding, "weight_decay": 0.0, "lr": 1e-3},
        ],
        lr=3e-3,
    )


def sgd_with_momentum(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1.0, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def cross_entropy(reduction: str, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        output.flatten(0, -2).float(),
        targets.flatten(),
        reduction=reduction,
        ignore_index=IGNORED,
    )


def generator(name: str, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{name}/{step}".encode()))


@dataclass(frozen=True, kw_only=True)
class Data:
    """How the batches of a case look."""

    batch: int = 12
    short_last_batch: bool = False
    """Two samples only in the last step: fewer than there are microbatches."""
    lengths: tuple[int, ...] = (8,)
    """Sequence lengths, step by step, over and over."""
    ignore: Literal["", "some", "whole samples", "a whole step"] = ""
    kind: Literal["tokens", "tokens and lengths", "features"] = "tokens"
    nan_step: int = -1

    def of(self, name: str, step: int, dtype: torch.dtype) -> Batch:
        """(inputs, targets) of one step."""
        rng = generator(name, step)
        batch = 2 if self.short_last_batch and step == STEPS - 1 else self.batch
        length = self.lengths[step % len(self.lengths)]
        tokens = torch.randint(0, models.VOCABULARY, (batch, length), generator=rng)
        targets = torch.randint(0, models.VOCABULARY, (batch, length), generator=rng)
        self._ignore(targets, step, rng)
        if self.kind == "tokens and lengths":
            lengths = torch.randint(1, length + 1, (batch,), generator=rng)
            return (tokens, lengths), targets
        if self.kind == "features":
            features = torch.randn(batch, 8, generator=rng)
            if step == self.nan_step:
                features[batch // 2, 3] = float("nan")
            return features.to(dtype), targets[:, 0].contiguous()
        return tokens, targets

    def _ignore(self, targets: torch.Tensor, step: int, rng: torch.Generator) -> None:
        if self.ignore in ("some", "whole samples"):
            targets[torch.rand(targets.shape, generator=rng) < 0.3] = IGNORED
        if self.ignore == "whole samples":
            targets[:5] = IGNORED  # with 12 samples in 3 or 8 microbatches the first has none left
        if self.ignore == "a whole step" and step == 2:
            targets[:] = IGNORED


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that must come out the same, bit for bit, whatever the split."""

    name: str
    model: Callable[[], models.Whole] = models.transformer
    data: Data = Data()
    reduction: Literal["sum", "mean"] = "sum"
    optimizer: Callable[[Named], torch.optim.Optimizer] = plain_adamw
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    max_grad_norm: float | None = None
    evaluate: bool = False
    """Evaluate before, between and after the steps."""
    skipped_step: int = -1
    frozen: tuple[str, ...] = ()
    """Prefixes of the parameters that must not move."""
    random: bool = False
    """Draws random numbers in the model: comparable with a run of one region only."""

    def batches(self, dtype: torch.dtype) -> Iterator[Batch]:
        for step in range(STEPS):
            yield self.data.of(self.name, step, dtype)

    def evaluation_batches(self, dtype: torch.dtype) -> list[Batch]:
        return [self.data.of(f"{self.name}/evaluate", step, dtype) for step in range(2)]

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.reduction, output, targets)


def _freezing(*keep: str) -> Callable[[], models.Whole]:
    return lambda: models.freeze(models.transformer(), keep=keep)


CASES = [
    Case(name="plain"),
    Case(name="mean loss", reduction="mean"),
    Case(name="ragged last microbatch", data=Data(batch=10)),
    Case(name="short last batch", data=Data(short_last_batch=True)),
    Case(name="ignored tokens", data=Data(ignore="some")),
    Case(name="microbatches without targets", data=Data(ignore="whole samples")),
    Case(
        name="microbatches without targets, mean loss",
        data=Data(ignore="whole samples"),
        reduction="mean",
    ),
    Case(
        name="a step without targets",
        data=Data(ignore="a whole step"),
        skipped_step=2,
        scheduler=halving,
    ),
    Case(name="lengths that differ", data=Data(lengths=(8, 5, 12)), reduction="mean"),
    Case(name="clipping", max_grad_norm=0.05),
    Case(name="clipping that rarely acts", max_grad_norm=0.6, data=Data(lengths=(4, 9))),
    Case(
        name="decay groups and a scheduler",
        optimizer=adamw_with_decay_groups,
        scheduler=halving,
        max_grad_norm=1.0,
    ),
    Case(name="SGD with momentum", optimizer=sgd_with_momentum, scheduler=halving),
    Case(
        name="frozen layers",
        model=_freezing("first.", "layers.1.", "last."),
        frozen=("layers.0.", "layers.2.", "layers.3."),
        max_grad_norm=0.1,
    ),
    Case(
        name="a frozen first region",
        model=_freezing("layers.2.", "layers.3.", "last."),
        frozen=("first.", "layers.0.", "layers.1."),
        max_grad_norm=0.1,
    ),
    Case(
        name="a frozen last region",
        model=_freezing("first.", "layers.0."),
        frozen=("layers.1.", "layers.2.", "layers.3.", "last."),
    ),
    Case(
        name="a tuple with a mask and None",
        model=models.masked_transformer,
        data=Data(kind="tokens and lengths", lengths=(8, 6)),
    ),
    Case(name="strides and a skip connection", model=models.swapping, max_grad_norm=0.5),
    Case(
        name="a NaN step",
        model=models.perceptron,
        data=Data(kind="features", nan_step=2),
        skipped_step=2,
        scheduler=halving,
        max_grad_norm=1.0,
    ),
    Case(name="evaluate", evaluate=True, data=Data(ignore="some"), reduction="mean"),
    Case(
        name="dropout",
        model=partial(models.transformer, dropout=0.2),
        evaluate=True,
        random=True,
    ),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
