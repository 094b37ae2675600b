"""Mixers of state layers of any kind: their weights, and how they are made of them."""

from __future__ import annotations

from ...layers.linear.kinds import Weights
from ...layers.mixers.mixer import Mixer
from ...layers.platform import Platform
from ...weights.layout import WeightSpec
from ...weights.model_config import ModelConfig
from .conv_parts import conv_of, short_conv
from .delta_parts import delta_net, delta_of


def state_weights_of(config: ModelConfig) -> dict[str, WeightSpec]:
    """Weights of one layer."""
    return delta_of(config) if config.conv is None else conv_of(config)


def state_mixer(config: ModelConfig, weights: Weights, platform: Platform, layer: int) -> Mixer:
    """The mixer of a layer, by the names of the layout."""
    made = delta_net if config.conv is None else short_conv
    return made(config, weights, platform, layer)
