"""Attention over latents that all heads share, one for each token. Source: DeepSeek-AI,
"DeepSeek-V2", 2024."""

from __future__ import annotations

from typing import Any

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs

from ..batch import ForwardBatch
from ..linear.linear import Linear, Product
from ..norm import RMSNorm
from ..platform import LatentPlatform


class LowRankQueries:
    """Queries that are made of a normed product of few numbers."""

    def __init__(self, platform: LatentPlatform, a: Linear, norm: RMSNorm, b: Linear) -> None:
        """a [rank, H], norm [rank], b [Hq D, rank]"""
        self._a = platform.linear(a)
        self._norm = norm
        self._b = platform.linear(b)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, Hq D]"""
        return self._b(self._norm(self._a(x)))


class LatentAttention:
    """Attention over latents, with the methods of `Attention`."""

    def __init__(
        self,
        platform: LatentPlatform,
        queries: Product,
        kv_a: Linear,
        kv_b: torch.Tensor,
        o: Linear,
        cos_sin: torch.Tensor,
        *,
        kv_norm: torch.Tensor,
        eps: float,
        scale: float,
        pairs: RotaryPairs,
    ) -> None:
        """`queries` makes x [T, H] to [T, Hq D]; kv_a [width, H] makes latents before kv_norm [rank]
        and positions; kv_b, scale and cos_sin as in `LatentPlatform`; o [H, Hq · value_dim]."""
        self._platform = platform
        self._queries = queries
        self._kv_a = platform.linear(kv_a)
        self._attention = platform.latent_attention(kv_b, scale)
        self._o = platform.linear(o)
        self._num_heads = len(kv_b)
        self._cos_sin = cos_sin
        self._kv_norm = kv_norm
        self._eps = eps
        self._pairs = pairs

    def queries(self, x: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, Hq, D]; latents go to the layer's cache [num_blocks, block_size,
        width]."""
        q = self._queries(x).view(len(x), self._num_heads, -1)
        self._platform.store_latents(
            q,
            self._kv_a(x),
            batch,
            self._cos_sin,
            cache,
            norm=self._kv_norm,
            eps=self._eps,
            pairs=self._pairs,
        )
        return q

    def attend(
        self, queries: torch.Tensor, cache: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        """queries [E, Hq, D], those that the plan speaks of → [E, H]"""
        return self._o(self._attention(queries, cache, attention_plan))

    def kept(self, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The queries of some tokens alone, integers [E]."""
        return queries.index_select(0, tokens)
