"""Operations of latent attention on a CPU."""

from __future__ import annotations

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.cpu.attention import AttentionPlan
from headwater.kernels.cpu.latent import (
    choose_latents,
    head_products,
    latent_attention,
    store_index_keys,
    store_latents,
)
from headwater.kernels.cpu.latent.chosen_plan import ChosenPlan, plan_chosen

from ...layers.batch import ForwardBatch
from ...layers.platform import IndexedQueries

LATENT_KERNELS = (
    store_latents.KERNEL,
    head_products.ABSORB,
    latent_attention.KERNEL,
    head_products.VALUES,
)


INDEX_KERNELS = (store_index_keys.KERNEL, choose_latents.SCORES, choose_latents.CHOICE)
"""Kernels of sparse indexers, beside those of latents."""


class CpuLatents:
    """See `IndexPlatform`."""

    def store_latents(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        *,
        norm: torch.Tensor,
        eps: float,
        pairs: RotaryPairs,
    ) -> None:
        store_latents.store_latents(
            q, kv, batch.positions, batch.slots, cos_sin, cache, norm=norm, eps=eps, pairs=pairs
        )

    def latent_attention(self, kv_b: torch.Tensor, scale: float) -> CpuLatentAttention:
        return CpuLatentAttention(kv_b, scale)

    def store_index_keys(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        keys: torch.Tensor,
        *,
        norm: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        pairs: RotaryPairs,
    ) -> None:
        where = batch.positions, batch.slots, cos_sin, keys
        store_index_keys.store_index_keys(q, k, *where, norm=norm, bias=bias, eps=eps, pairs=pairs)

    def plan_chosen(self, batch: ForwardBatch, num_heads: int, num_chosen: int) -> ChosenPlan:
        """Plan of a batch for `indexed_attention`."""
        return plan_chosen(batch.starts, batch.counts, batch.block_tables, num_heads, num_chosen)

    def indexed_attention(
        self, kv_b: torch.Tensor, scale: float, num_chosen: int
    ) -> CpuIndexedAttention:
        return CpuIndexedAttention(CpuLatentAttention(kv_b, scale))


class CpuLatentAttention:
    """See `HeadsOverLatents`."""

    def __init__(self, kv_b: torch.Tensor, scale: float) -> None:
        self._kv_b = kv_b
        self._scale = scale

    def __call__(
        self, q: torch.Tensor, cache: torch.Tensor, attention_plan: AttentionPlan
    ) -> torch.Tensor:
        _, raised, rank = self._kv_b.shape
        width = cache.shape[2]
        absorbed = head_products.absorbed_queries(q, self._kv_b, rank, width)
        attended = latent_attention.latent_attention(
            absorbed, cache, attention_plan, rank, self._scale
        )
        plain = q.shape[2] - (width - rank)
        return head_products.head_values(attended, self._kv_b, raised - plain)


class CpuIndexedAttention:
    """See `HeadsOverChosen`."""

    def __init__(self, attention: CpuLatentAttention) -> None:
        self._attention = attention

    def __call__(
        self, queries: IndexedQueries, cache: torch.Tensor, attention_plan: ChosenPlan
    ) -> torch.Tensor:
        width = cache.shape[2] - queries.index_heads.shape[2]
        tables = attention_plan.block_tables
        found = []
        for piece in attention_plan.pieces:
            own = IndexedQueries(*(each[piece.first : piece.stop] for each in queries))
            gathered = cache.new_empty(len(own.heads), attention_plan.room, width)
            choose_latents.choose_latents(
                own.index_heads, own.head_weights, cache, tables, piece, width, gathered
            )
            found.append(self._attention(own.heads, gathered, piece.attention))
        return torch.cat(found)
