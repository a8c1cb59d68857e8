"""Which codec carries which tensor of a boundary."""

from typing import Literal

Role = Literal["activation", "gradient", "side"]
"""What a tensor is to the boundary: "side" is everything that rides along and is not an output of
the model: targets, token ids, masks, positions."""

LOSSLESS = ("none", "planes")
"""Codecs that give back every bit. Every other codec is for floating-point activations and
gradients only."""

_LOSSLESS_FALLBACK = "planes"


def codec_name_for(
    role: Role, *, is_floating: bool, activations: str, gradients: str
) -> tuple[str, str]:
    """Choose a codec and say why.

    Args:
        role: What the tensor is.
        is_floating: Whether its dtype is real or complex floating point; integers and booleans are
            never coded with loss, whatever their role.
        activations: The configured `run.compression.activations`.
        gradients: The configured `run.compression.gradients`.

    Returns:
        The codec's name and the reason in a few words.
    """
    configured = gradients if role == "gradient" else activations
    if role != "side" and is_floating:
        return configured, f"run.compression.{role}s"
    if configured in LOSSLESS:
        return configured, "configured, and lossless"
    what = "side inputs" if role == "side" else "integers and booleans"
    return _LOSSLESS_FALLBACK, f"{what} are never coded with loss"
