"""Gated delta nets of a model's layers: their weights, names of these in checkpoints, and the layer
that is made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from headwater.kernels.delta.delta_arguments import DeltaLayer, HeadPlaces, conv_by_unit
from headwater.kernels.delta.delta_unit import CONV_WIDTH

from ...layers.linear.kinds import Weights
from ...layers.mixers.delta_net import DeltaNet
from ...layers.platform import Platform, StatePlatform
from ...weights.layout import (
    Split,
    WeightSpec,
    divided,
    joined_linear,
    linear,
    norm,
    table,
)
from ...weights.model_config import ModelConfig
from ..experts.expert_parts import check_unrounded

WIDE = "delta_wide"
NARROW = "delta_narrow"
CONV = "delta_conv"
RATES = "delta_rates"
BIASES = "delta_biases"
NORM = "delta_norm"
OUT = "delta_o"
DELTA_NAMES = {
    "linear_attn.in_proj_qkvz.weight": WIDE,
    "linear_attn.in_proj_ba.weight": NARROW,
    "linear_attn.conv1d.weight": CONV,
    "linear_attn.A_log": RATES,
    "linear_attn.dt_bias": BIASES,
    "linear_attn.norm.weight": NORM,
    "linear_attn.out_proj.weight": OUT,
}
"""Like `CheckpointNames.layer`, of Qwen3-Next."""
SPLIT_NAMES = {
    "linear_attn.in_proj_qkv.weight": (WIDE, 0),
    "linear_attn.in_proj_z.weight": (WIDE, 1),
    "linear_attn.in_proj_b.weight": (NARROW, 0),
    "linear_attn.in_proj_a.weight": (NARROW, 1),
}
"""Like `CheckpointNames.fused`, of Qwen3.5, which has the projections by kind."""


def delta_of(config: ModelConfig) -> dict[str, WeightSpec]:
    """Weights of one layer's gated delta net."""
    delta = config.delta
    assert delta is not None
    hidden = config.hidden_size
    num_values = delta.num_value_heads
    channels = delta.keys_size, delta.keys_size, delta.values_size
    wide = joined_linear((delta.num_channels, delta.values_size), hidden)
    narrow = joined_linear((num_values, num_values), hidden)
    by_kind = (*channels, delta.values_size), (num_values, num_values)
    # Key heads are contiguous, so that a share of all rows is whole heads.
    by_head = (wide.shape[0],), (narrow.shape[0],)
    of_wide, of_narrow = by_head if delta.is_by_head else by_kind
    return {
        WIDE: divided(wide, of_wide),
        NARROW: divided(narrow, of_narrow),
        CONV: divided(table(delta.num_channels, CONV_WIDTH), channels),
        RATES: _of_heads(num_values),
        BIASES: _of_heads(num_values),
        NORM: norm(delta.value_dim),
        OUT: linear(hidden, delta.values_size, split=Split.INPUTS),
    }


def conv_of(conv: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """A published convolution [channels, 1, CONV_WIDTH] → [channels, CONV_WIDTH]."""
    return conv.squeeze(1)


def delta_net(config: ModelConfig, weights: Weights, platform: Platform, layer: int) -> DeltaNet:
    """The gated delta net of a layer, by the names of the layout."""
    delta = config.delta
    states = config.states
    assert delta is not None
    assert states is not None
    own = cast(StatePlatform, platform)
    prefix = f"layers.{layer}."
    wide, narrow, o = (weights.linears[prefix + name] for name in (WIDE, NARROW, OUT))
    for each in (wide, narrow, o):
        check_unrounded(each, config)
    unit = delta.unit(own.block_size, weights.table("embed").dtype.itemsize)
    conv, rates, biases, factors = (
        weights.tensors[prefix + name].float() for name in (CONV, RATES, BIASES, NORM)
    )
    num_heads = delta.num_key_heads
    places = HeadPlaces.by_kind(num_heads, unit)
    return DeltaNet(
        own,
        wide,
        narrow,
        o,
        DeltaLayer(
            unit=unit,
            places=HeadPlaces.by_head(unit) if delta.is_by_head else places,
            conv=conv_by_unit(conv, num_heads, unit),
            rates=rates.exp(),
            biases=biases,
            norm=factors,
            eps=config.rms_norm_eps,
        ),
        first_unit=states.first_units[layer],
    )


def _of_heads(num_heads: int) -> WeightSpec:
    return replace(divided(table(num_heads), (num_heads,)), is_wide=True)
