"""Sparse indexers of a model's layers: their weights, names of these in checkpoints, and the
attention that is made of them. Source: DeepSeek-AI, "DeepSeek-V3.2", 2025."""

from __future__ import annotations

from dataclasses import replace

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs

from ...layers.linear.dense import DenseLinear
from ...layers.linear.kinds import Weights
from ...layers.mixers.indexer import Indexer
from ...layers.platform import IndexPlatform
from ...weights.layout import WeightSpec, bias, linear, norm, table
from ...weights.model_config import ModelConfig
from ..experts.expert_parts import check_unrounded

Q = "index_q"
K = "index_k"
NORM = "index_norm"
BIAS = "index_norm_bias"
HEAD_WEIGHTS = "index_weights"
INDEX_NAMES = {
    "self_attn.indexer.wq_b.weight": Q,
    "self_attn.indexer.wk.weight": K,
    "self_attn.indexer.k_norm.weight": NORM,
    "self_attn.indexer.k_norm.bias": BIAS,
    "self_attn.indexer.weights_proj.weight": HEAD_WEIGHTS,
}
"""Our names of tensors by those of checkpoints, as in `CheckpointNames.layer`."""
NORM_EPS = 1e-6


def index_weights_of(config: ModelConfig, layer: int) -> dict[str, WeightSpec]:
    """Weights of a layer's indexer, of which every rank has all: ranks choose the same latents.
    Empty: it has none."""
    index = config.index
    if index is None or index.layer_of(layer) != layer:
        return {}
    assert config.latent is not None
    hidden = config.hidden_size
    return {
        Q: linear(index.num_heads * index.head_dim, config.latent.query_rank),
        K: linear(index.head_dim, hidden),
        NORM: norm(index.head_dim),
        BIAS: bias(index.head_dim),
        HEAD_WEIGHTS: replace(table(index.num_heads, hidden), is_routing=True, is_wide=True),
    }


def indexer(
    config: ModelConfig,
    weights: Weights,
    platform: IndexPlatform,
    prefix: str,
    cos_sin: torch.Tensor,
) -> Indexer:
    """The indexer of the layer with this prefix, by the names of the layout."""
    index = config.index
    assert index is not None
    linears = weights.linears
    for name in (Q, K):
        check_unrounded(linears[prefix + name], config)
    tensors = weights.tensors
    return Indexer(
        platform,
        linears[prefix + Q],
        linears[prefix + K],
        DenseLinear(tensors[prefix + HEAD_WEIGHTS]),
        cos_sin,
        norm=tensors[prefix + NORM],
        norm_bias=tensors[prefix + BIAS],
        eps=NORM_EPS,
        num_heads=index.num_heads,
        pairs=RotaryPairs(cos_sin.shape[1], index.is_interleaved),
    )
