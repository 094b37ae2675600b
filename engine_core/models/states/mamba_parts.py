"""Layers of Mamba-2 of a model: their weights, names of these in checkpoints, and the layer that is
made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from headwater.kernels.mamba.mamba_layer import MambaLayer

from ...layers.linear.kinds import Weights
from ...layers.mixers.mamba import Mamba
from ...layers.norm import RMSNorm
from ...layers.platform import MambaPlatform, Platform
from ...weights.layout import Split, WeightSpec, linear, norm, table
from ...weights.model_config import ModelConfig
from ..experts.expert_parts import check_unrounded

PARTS = "mamba_parts"
TAPS = "mamba_taps"
TAPS_BIAS = "mamba_conv_bias"
RATES = "mamba_rates"
STEP_BIASES = "mamba_steps"
SKIPS = "mamba_skips"
NORM = "mamba_norm"
OUT = "mamba_o"
MAMBA_NAMES = {
    "mamba.in_proj.weight": PARTS,
    "mamba.conv1d.weight": TAPS,
    "mamba.conv1d.bias": TAPS_BIAS,
    "mamba.A_log": RATES,
    "mamba.dt_bias": STEP_BIASES,
    "mamba.D": SKIPS,
    "mamba.norm.weight": NORM,
    "mamba.out_proj.weight": OUT,
}
"""As `CheckpointNames.layer`, of Granite 4."""


def mamba_of(config: ModelConfig) -> dict[str, WeightSpec]:
    """Weights of one layer."""
    mamba = config.mamba
    assert mamba is not None
    hidden = config.hidden_size
    heads = replace(table(mamba.num_heads), is_wide=True)
    return {
        PARTS: linear(mamba.values_size + mamba.num_channels + mamba.num_heads, hidden),
        TAPS: table(mamba.num_channels, mamba.width),
        TAPS_BIAS: table(mamba.num_channels),
        RATES: heads,
        STEP_BIASES: heads,
        SKIPS: heads,
        NORM: norm(mamba.values_size),
        OUT: linear(hidden, mamba.values_size, split=Split.INPUTS),
    }


def mamba_layer(config: ModelConfig, weights: Weights, platform: Platform, layer: int) -> Mamba:
    """The layer, by the names of the layout."""
    states = config.states
    assert config.mamba is not None
    assert states is not None
    own = cast(MambaPlatform, platform)
    prefix = f"layers.{layer}."
    parts, o = (weights.linears[prefix + name] for name in (PARTS, OUT))
    for each in (parts, o):
        check_unrounded(each, config)
    taps, bias, rates, steps, skips = (
        weights.tensors[prefix + name].float()
        for name in (TAPS, TAPS_BIAS, RATES, STEP_BIASES, SKIPS)
    )
    return Mamba(
        own,
        parts,
        o,
        RMSNorm(platform, weights.tensors[prefix + NORM], config.rms_norm_eps),
        MambaLayer(
            unit=config.mamba.unit(own.block_size, weights.table("embed").dtype.itemsize),
            num_groups=config.mamba.num_groups,
            taps=taps.T.contiguous(),
            bias=bias.contiguous(),
            rates=rates.exp(),
            step_biases=steps.contiguous(),
            skips=skips.contiguous(),
        ),
        first_unit=states.first_units[layer],
    )
