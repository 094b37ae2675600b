"""Operations of latent attention on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headwater.kernels.attention import hopper_attention
from headwater.kernels.attention.reduce_splits import reduce_splits
from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.latent import hopper_latent_attention as hopper
from headwater.kernels.latent.head_products import absorbed_queries, head_values
from headwater.kernels.latent.latent_attention import latent_decode, latent_prefill
from headwater.kernels.latent.latent_plan import LatentPlan
from headwater.kernels.latent.latent_tiles import KEYS
from headwater.kernels.latent.store_latents import store_latents

from ...layers.batch import ForwardBatch
from ..cuda_attention_plans import AttentionPlan, AttentionPlans
from .cuda_plans import LatentPlans


@dataclass(frozen=True, slots=True)
class LatentKernels:
    """Launchers for queries and latents of one kind; all kinds give the same bits. Arguments are
    those of `latent_decode` and `latent_prefill`."""

    decode: Callable[..., None]
    prefill: Callable[..., None]


ANY_GPU = LatentKernels(latent_decode, latent_prefill)
HOPPER = LatentKernels(hopper.hopper_latent_decode, hopper.hopper_latent_prefill)


def latent_kernels(q: torch.Tensor, cache: torch.Tensor, rank: int) -> LatentKernels:
    """Kernels for absorbed queries [E, Hq, width] over latents [num_blocks, block_size, width]."""
    is_served = (
        q.dtype == cache.dtype == torch.bfloat16
        and (rank, q.shape[2] - rank) == (hopper.RANK, hopper.ROTARY)
        and cache.shape[1] % KEYS == 0
        and hopper_attention.is_hopper(q.device)
        and cache[0].is_contiguous()
        and cache.stride(0) % cache.shape[2] == 0
    )
    return HOPPER if is_served else ANY_GPU


class CudaLatents:
    """See `LatentPlatform`."""

    plans: AttentionPlans

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
        where = batch.positions, batch.slots, cos_sin, cache
        store_latents(q, kv, *where, norm=norm, eps=eps, pairs=pairs)

    def latent_attention(self, kv_b: torch.Tensor, scale: float) -> CudaLatentAttention:
        assert isinstance(self.plans, LatentPlans)
        return CudaLatentAttention(kv_b, scale, self.plans.totals)


class CudaLatentAttention:
    """See `HeadsOverLatents`."""

    def __init__(self, kv_b: torch.Tensor, scale: float, totals: torch.Tensor) -> None:
        """`totals` of `room_for_totals`."""
        self._kv_b = kv_b
        self._scale = scale
        self._totals = totals

    def __call__(
        self, q: torch.Tensor, cache: torch.Tensor, attention_plan: AttentionPlan
    ) -> torch.Tensor:
        plan = attention_plan
        n = plan.num_decodes
        _, raised, rank = self._kv_b.shape
        plain = q.shape[2] - (cache.shape[2] - rank)
        absorbed = absorbed_queries(q, self._kv_b, cache.shape[2])
        attended = absorbed.new_empty(*q.shape[:2], rank)
        kernels = latent_kernels(absorbed, cache, rank)
        if n:
            assert isinstance(plan.decode, LatentPlan)
            where = plan.seq_lens, plan.table_rows, plan.block_tables, plan.decode
            kernels.decode(absorbed[:n], cache, *where, attended[:n], scale=self._scale)
            reduce_splits(plan.seq_lens, plan.decode, attended[:n])
        if len(plan.tiles):
            kernels.prefill(
                absorbed,
                cache,
                plan.query_starts,
                plan.chunk_lens,
                plan.chunk_rows,
                plan.block_tables,
                plan.tiles,
                self._totals,
                attended,
                scale=self._scale,
            )
        return head_values(attended, self._kv_b, raised - plain)
