"""Mamba-2 layers of a model: their weights, their names in checkpoints, and the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from headwater.kernels.mamba.mamba_layer import MambaLayer

from ...layers.linear.kinds import Weights
from ...layers.mixers.mamba import Mamba
from ...layers.norm import GroupNorm, RMSNorm, WidthNorm
from ...layers.platform import MambaPlatform, Platform
from ...weights.layout import Split, WeightSpec, divided, linear, table, width_norm
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
_NAMES = {
    "in_proj.weight": PARTS,
    "conv1d.weight": TAPS,
    "conv1d.bias": TAPS_BIAS,
    "A_log": RATES,
    "dt_bias": STEP_BIASES,
    "D": SKIPS,
    "norm.weight": NORM,
    "out_proj.weight": OUT,
}


def mamba_names(place: str) -> dict[str, str]:
    """Like `CheckpointNames.layer`, of weights behind a place in a layer."""
    return {f"{place}.{name}": ours for name, ours in _NAMES.items()}


def mamba_of(config: ModelConfig) -> dict[str, WeightSpec]:
    """Weights of one layer."""
    mamba = config.mamba
    assert mamba is not None
    hidden = config.hidden_size
    values = mamba.values_size
    channels = values, mamba.keys_size, mamba.keys_size
    parts = values, *channels, mamba.num_heads
    # All heads read the keys and queries of the only group.
    has_one = mamba.num_groups == 1
    heads = replace(divided(table(mamba.num_heads), (mamba.num_heads,)), is_wide=True)
    norms = {NORM: width_norm(values)} if mamba.num_norm_groups else {}
    copied_channels = frozenset({1, 2} if has_one else ())
    return norms | {
        PARTS: divided(linear(sum(parts), hidden), parts, frozenset({2, 3} if has_one else ())),
        TAPS: divided(table(mamba.num_channels, mamba.width), channels, copied_channels),
        TAPS_BIAS: divided(table(mamba.num_channels), channels, copied_channels),
        RATES: heads,
        STEP_BIASES: heads,
        SKIPS: heads,
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
        _norm_of(config, weights, platform, prefix),
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
        factors=_factors_of(config, taps.device, weights.table("embed").dtype),
    )


def _norm_of(
    config: ModelConfig, weights: Weights, platform: Platform, prefix: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm of a layer's gated outputs."""
    assert config.mamba is not None
    mamba = config.mamba
    if mamba.num_norm_groups == 0:
        return lambda outputs: outputs
    factors = weights.tensors[prefix + NORM]
    eps = config.rms_norm_eps
    if not mamba.has_width_norm:
        return GroupNorm(platform, factors, eps, mamba.num_norm_groups // mamba.num_ranks)
    if mamba.num_ranks > 1:
        return WidthNorm(platform, factors, eps, weights.group)
    return RMSNorm(platform, factors, eps)


def _factors_of(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    """Factors of a projection's numbers; None: there are none."""
    mamba = config.mamba
    multipliers = config.multipliers
    if multipliers is None:
        return None
    assert mamba is not None
    values = mamba.values_size
    sizes = torch.tensor([values, values, mamba.keys_size, mamba.keys_size, mamba.num_heads])
    factors = multipliers.mamba_in * torch.tensor(multipliers.projections)
    return factors.repeat_interleave(sizes).to(device, dtype)
