"""Operations of latent attention on a CPU."""

from __future__ import annotations

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.cpu.attention import AttentionPlan
from headwater.kernels.cpu.latent import head_products, latent_attention, store_latents

from ...layers.batch import ForwardBatch

LATENT_KERNELS = (
    store_latents.KERNEL,
    head_products.ABSORB,
    latent_attention.KERNEL,
    head_products.VALUES,
)


class CpuLatents:
    """See `LatentPlatform`."""

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
