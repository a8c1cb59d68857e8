"""What may be coded with loss, and what never."""

import pytest

from geotrain.compression.codec import CODEC_NAMES
from geotrain.compression.policy import LOSSLESS, codec_name_for


def test_activations_and_gradients_get_what_is_configured_for_them():
    assert codec_name_for(
        "activation", is_floating=True, activations="planes", gradients="none"
    ) == ("planes", "run.compression.activations")
    assert codec_name_for("gradient", is_floating=True, activations="planes", gradients="none") == (
        "none",
        "run.compression.gradients",
    )


@pytest.mark.parametrize("configured", LOSSLESS)
@pytest.mark.parametrize("is_floating", (True, False))
def test_side_inputs_use_a_configured_lossless_codec(configured, is_floating):
    name, reason = codec_name_for(
        "side", is_floating=is_floating, activations=configured, gradients="none"
    )
    assert (name, reason) == (configured, "configured, and lossless")


@pytest.mark.parametrize(
    ("role", "is_floating"),
    [("side", True), ("side", False), ("activation", False), ("gradient", False)],
)
def test_a_lossy_codec_never_touches_side_inputs_or_integers(role, is_floating):
    name, reason = codec_name_for(
        role, is_floating=is_floating, activations="int8", gradients="int8"
    )
    assert name == "planes"
    assert reason.endswith("never coded with loss")


def test_lossless_codecs_exist():
    assert set(LOSSLESS) <= set(CODEC_NAMES)
