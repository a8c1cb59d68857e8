"""Models of the parity suite, in plain torch.

Shapes: B batch, T sequence, C width, V vocabulary. Every model has `first`, four `layers` and
`last`, and calls each with what the one before returned.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

NUM_LAYERS = 4
WIDTH = 16
VOCABULARY = 32
NUM_HEADS = 2
SPLIT = ("first", "layers", "last")


class Whole(nn.Module):
    """`first`, the layers, `last`, one after another."""

    def __init__(self, first: nn.Module, layers: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(layers)
        self.last = last

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Block(nn.Module):
    """A small transformer layer."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x_BTC: torch.Tensor, mask_B1TT: torch.Tensor | None) -> torch.Tensor:
        batch, length, _ = x_BTC.shape
        qkv = self.qkv(self.attention_norm(x_BTC))
        q, k, v = qkv.view(batch, length, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_B1TT, is_causal=mask_B1TT is None
        )
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self.attend(x_BTC, None)
        return x_BTC + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x_BTC)))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(x_BTC))


def transformer(*, dropout: float = 0.0) -> Whole:
    blocks: list[nn.Module] = [Block(dropout=dropout) for _ in range(NUM_LAYERS)]
    return Whole(nn.Embedding(VOCABULARY, WIDTH), blocks, Head())


# ---- a boundary that is a tuple: hidden states, a mask, and None


class MaskedEmbedding(nn.Module):
    """(tokens, lengths) to (hidden states, boolean mask, None)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        tokens_BT, lengths_B = inputs
        position_T = torch.arange(tokens_BT.shape[1])
        seen_BT = position_T[None, :] < lengths_B[:, None]
        causal_TT = position_T[:, None] >= position_T[None, :]
        mask_B1TT = causal_TT[None, None] & seen_BT[:, None, None, :]
        return self.table(tokens_BT), mask_B1TT, None


class MaskedBlock(Block):
    def forward(self, inputs: Any) -> Any:
        x_BTC, mask_B1TT, nothing = inputs
        assert nothing is None
        x_BTC = x_BTC + self.attend(x_BTC, mask_B1TT)
        x_BTC = x_BTC + self.down(functional.gelu(self.up(self.mlp_norm(x_BTC))))
        return x_BTC, mask_B1TT, nothing


class MaskedHead(Head):
    def forward(self, inputs: Any) -> torch.Tensor:
        return super().forward(inputs[0])


def masked_transformer() -> Whole:
    return Whole(MaskedEmbedding(), [MaskedBlock() for _ in range(NUM_LAYERS)], MaskedHead())


# ---- a boundary whose tensors are not contiguous, and a skip connection that crosses it


class Swapping(nn.Module):
    """Puts out its result transposed, beside what it was given: strides and two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x_TBC, skip = inputs["x"], inputs["skip"]
        y_TBC = functional.silu(self.mix(self.norm(x_TBC))) + skip.transpose(0, 1)
        return {"x": y_TBC.transpose(0, 1), "skip": x_TBC}


class SwappingFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        x_BTC = self.table(tokens_BT)
        return {"x": x_BTC, "skip": x_BTC.transpose(0, 1)}


class SwappingLast(Head):
    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(inputs["x"] + inputs["skip"].transpose(0, 1))


def swapping() -> Whole:
    return Whole(SwappingFirst(), [Swapping() for _ in range(NUM_LAYERS)], SwappingLast())


# ---- real-valued inputs, which can be NaN


class Dense(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def perceptron() -> Whole:
    layers: list[nn.Module] = [Dense(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    return Whole(Dense(8, WIDTH), layers, nn.Linear(WIDTH, VOCABULARY))


def freeze(model: Whole, *, keep: tuple[str, ...]) -> Whole:
    """Freeze every parameter whose name does not start with one of `keep`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(keep))
    return model
