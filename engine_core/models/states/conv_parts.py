"""Short convolutions of a model's layers: their weights, names of these in checkpoints, and the
layer that is made of them."""

from __future__ import annotations

from typing import cast

from headwater.kernels.conv.conv_layer import ConvLayer, ConvUnit

from ...layers.linear.kinds import Weights
from ...layers.mixers.short_conv import ShortConv
from ...layers.platform import ConvPlatform, Platform
from ...weights.layout import Split, WeightSpec, divided, joined_linear, linear, table
from ...weights.model_config import ModelConfig
from ..experts.expert_parts import check_unrounded

PARTS = "conv_parts"
TAPS = "conv_taps"
OUT = "conv_o"
CONV_NAMES = {
    "conv.in_proj.weight": PARTS,
    "conv.conv.weight": TAPS,
    "conv.out_proj.weight": OUT,
}
"""Like `CheckpointNames.layer`, of LFM2."""


def conv_of(config: ModelConfig) -> dict[str, WeightSpec]:
    """Weights of one layer's convolution."""
    assert config.conv is not None
    hidden = config.hidden_size
    return {
        PARTS: joined_linear((hidden, hidden, hidden), hidden),
        TAPS: divided(table(hidden, config.conv.width), (hidden,)),
        OUT: linear(hidden, hidden, split=Split.INPUTS),
    }


def short_conv(config: ModelConfig, weights: Weights, platform: Platform, layer: int) -> ShortConv:
    """The convolution of a layer, by the names of the layout."""
    states = config.states
    assert config.conv is not None
    assert states is not None
    prefix = f"layers.{layer}."
    parts, o = (weights.linears[prefix + name] for name in (PARTS, OUT))
    for each in (parts, o):
        check_unrounded(each, config)
    own = cast(ConvPlatform, platform)
    unit = ConvUnit(
        num_channels=config.conv.num_channels, width=config.conv.width, block_size=own.block_size
    )
    taps = weights.tensors[prefix + TAPS].float().T.contiguous()
    return ShortConv(
        own,
        parts,
        o,
        ConvLayer(unit=unit, taps=taps),
        first_unit=states.first_units[layer],
    )
