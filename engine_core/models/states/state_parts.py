"""Mixers of state layers of any kind: their weights, and how they are made of them."""

from __future__ import annotations

from ...layers.linear.kinds import Weights
from ...layers.mixers.mixer import Mixer
from ...layers.platform import Platform
from ...weights.layout import WeightSpec
from ...weights.model_config import ModelConfig
from .conv_parts import conv_of, short_conv
from .delta_parts import delta_net, delta_of
from .mamba_parts import mamba_layer, mamba_of


def state_weights_of(config: ModelConfig) -> dict[str, WeightSpec]:
    """Weights of one layer."""
    if config.conv is not None:
        return conv_of(config)
    return delta_of(config) if config.mamba is None else mamba_of(config)


def state_mixer(config: ModelConfig, weights: Weights, platform: Platform, layer: int) -> Mixer:
    """The mixer of a layer, by the names of the layout."""
    if config.conv is not None:
        return short_conv(config, weights, platform, layer)
    made = delta_net if config.mamba is None else mamba_layer
    return made(config, weights, platform, layer)
