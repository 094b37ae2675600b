"""Latent attention of a model's layers: its weights, their names in checkpoints, and the layer."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from headwater.kernels.attention.rotary_pairs import RotaryPairs

from ...layers.linear.kinds import Weights
from ...layers.linear.linear import Product
from ...layers.mixers.indexed_attention import IndexedAttention
from ...layers.mixers.indexer import Indexer, SharedIndexer
from ...layers.mixers.latent_attention import LatentAttention, LatentStore, LowRankQueries
from ...layers.norm import RMSNorm
from ...layers.platform import IndexPlatform, LatentPlatform, Platform
from ...layers.rope import cos_sin_table
from ...weights.layout import Split, WeightSpec, joined_linear, linear, norm, table
from ...weights.model_config import ModelConfig
from ..experts.expert_parts import check_unrounded
from .index_parts import INDEX_NAMES, index_weights_of, indexer

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
    **INDEX_NAMES,
}
"""Our names of tensors by those of checkpoints, as in `CheckpointNames.layer`."""
LOW_RANK_EPS = 1e-6
"""Epsilon of norms of products of few numbers, whatever the config says of other norms."""


def latent_weights_of(config: ModelConfig, layer: int) -> dict[str, WeightSpec]:
    """Weights of a layer. The weight that latents are raised by is never packed: queries are
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
        **index_weights_of(config, layer),
    }


class LatentMixers:
    """Builds the attention of a model's layers, first to last, by the names of the layout."""

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        assert config.latent is not None
        rotated = replace(config, head_dim=config.latent.rotary_dim)
        self._config = config
        self._weights = weights
        self._platform = platform
        self._cos_sin = cos_sin_table(rotated, max_model_len).to(platform.device)
        self._indexers: dict[int, Indexer] = {}

    def __call__(self, layer: int) -> LatentAttention | IndexedAttention:
        config = self._config
        weights = self._weights
        latent = config.latent
        assert latent is not None
        prefix = f"layers.{layer}."
        own = cast(LatentPlatform, self._platform)
        for name in (Q, Q_A, Q_B, KV_A, OUT):
            if prefix + name in weights.linears:
                check_unrounded(weights.linears[prefix + name], config)
        store = LatentStore(
            own,
            weights.linears[prefix + KV_A],
            self._cos_sin,
            num_heads=config.num_heads,
            norm=weights.tensors[prefix + KV_NORM],
            eps=LOW_RANK_EPS,
            pairs=RotaryPairs(latent.rotary_dim, config.is_interleaved),
        )
        queries = _queries(weights, own, prefix)
        shape = config.num_heads, latent.raised_dim, latent.kv_rank
        kv_b = weights.tensors[prefix + KV_B].view(shape)
        scale = config.attention_scale or latent.query_dim**-0.5
        o = own.linear(weights.linears[prefix + OUT])
        if latent.index is None:
            return LatentAttention(queries, store, own.latent_attention(kv_b, scale), o)
        indexing = cast(IndexPlatform, self._platform)
        attention = indexing.indexed_attention(kv_b, scale, latent.index.num_chosen)
        assert isinstance(queries, LowRankQueries)
        return IndexedAttention(queries, store, self._indexer(layer, indexing), attention, o)

    def _indexer(self, layer: int, platform: IndexPlatform) -> Indexer | SharedIndexer:
        index = self._config.index
        assert index is not None
        source = index.layer_of(layer)
        if source != layer:
            return SharedIndexer(self._indexers[source])
        prefix = f"layers.{layer}."
        made = indexer(self._config, self._weights, platform, prefix, self._cos_sin)
        self._indexers[layer] = made
        return made


def _queries(weights: Weights, platform: LatentPlatform, prefix: str) -> Product:
    linears = weights.linears
    if prefix + Q in linears:
        return platform.linear(linears[prefix + Q])
    q_norm = RMSNorm(platform, weights.tensors[prefix + Q_NORM], LOW_RANK_EPS)
    return LowRankQueries(platform, linears[prefix + Q_A], q_norm, linears[prefix + Q_B])
