"""Latent attention of a model's layers: its weights, names of these in checkpoints, and the layer
that is made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs

from ...layers.linear.kinds import Weights
from ...layers.linear.linear import Linear, Product
from ...layers.mixers.latent_attention import LatentAttention, LowRankQueries
from ...layers.norm import RMSNorm
from ...layers.platform import LatentPlatform, Platform
from ...layers.rope import cos_sin_table
from ...weights.layout import Split, WeightSpec, joined_linear, linear, norm, table
from ...weights.model_config import ModelConfig
from ..experts.expert_parts import check_unrounded

Q = "q"
Q_A = "q_a"
Q_NORM = "q_a_norm"
Q_B = "q_b"
KV_A = "kv_a"
KV_NORM = "kv_a_norm"
KV_B = "kv_b"
OUT = "o"
LATENT_NAMES = {
    "self_attn.q_proj.weight": Q,
    "self_attn.q_a_proj.weight": Q_A,
    "self_attn.q_a_layernorm.weight": Q_NORM,
    "self_attn.q_b_proj.weight": Q_B,
    "self_attn.kv_a_proj_with_mqa.weight": KV_A,
    "self_attn.kv_a_layernorm.weight": KV_NORM,
    "self_attn.kv_b_proj.weight": KV_B,
    "self_attn.o_proj.weight": OUT,
}
"""Our names of tensors by those of checkpoints, as in `CheckpointNames.layer`."""
LOW_RANK_EPS = 1e-6
"""Epsilon of norms of products of few numbers, whatever the config says of other norms."""


def latent_weights_of(config: ModelConfig) -> dict[str, WeightSpec]:
    """Weights of one layer. The weight that latents are raised by is never packed: queries are
    multiplied by a part of it transposed. Ranks divide heads; each makes all latents."""
    latent = config.latent
    assert latent is not None
    hidden = config.hidden_size
    num_queries = config.num_heads * latent.query_dim
    queries = {Q: joined_linear((num_queries,), hidden)}
    if latent.query_rank:
        queries = {
            Q_A: linear(latent.query_rank, hidden),
            Q_NORM: norm(latent.query_rank),
            Q_B: joined_linear((num_queries,), latent.query_rank),
        }
    raised = config.num_heads * latent.raised_dim
    return {
        **queries,
        KV_A: linear(latent.width, hidden),
        KV_NORM: norm(latent.kv_rank),
        KV_B: replace(table(raised, latent.kv_rank, split=Split.OUTPUTS), parts=(raised,)),
        OUT: linear(hidden, config.num_heads * latent.value_dim, split=Split.INPUTS),
    }


def latent_rotation(config: ModelConfig, max_model_len: int) -> torch.Tensor:
    """float32 [positions, rotary_dim], as `cos_sin_table` makes it; the same for all layers."""
    assert config.latent is not None
    return cos_sin_table(replace(config, head_dim=config.latent.rotary_dim), max_model_len)


def latent_attention(
    config: ModelConfig, weights: Weights, platform: Platform, layer: int, cos_sin: torch.Tensor
) -> LatentAttention:
    """The attention of a layer, by the names of the layout."""
    latent = config.latent
    assert latent is not None
    prefix = f"layers.{layer}."
    own = cast(LatentPlatform, platform)

    def unrounded(name: str) -> Linear:
        found = weights.linears[prefix + name]
        check_unrounded(found, config)
        return found

    return LatentAttention(
        own,
        _queries(config, weights, own, prefix),
        unrounded(KV_A),
        weights.tensors[prefix + KV_B].view(config.num_heads, latent.raised_dim, latent.kv_rank),
        unrounded(OUT),
        cos_sin,
        kv_norm=weights.tensors[prefix + KV_NORM],
        eps=LOW_RANK_EPS,
        scale=config.attention_scale or latent.query_dim**-0.5,
        pairs=RotaryPairs(latent.rotary_dim, config.is_interleaved),
    )


def _queries(
    config: ModelConfig, weights: Weights, platform: LatentPlatform, prefix: str
) -> Product:
    linears = weights.linears
    for name in (Q, Q_A, Q_B):
        if prefix + name in linears:
            check_unrounded(linears[prefix + name], config)
    if prefix + Q in linears:
        return platform.linear(linears[prefix + Q])
    q_norm = RMSNorm(platform, weights.tensors[prefix + Q_NORM], LOW_RANK_EPS)
    return LowRankQueries(platform, linears[prefix + Q_A], q_norm, linears[prefix + Q_B])
