"""Attention over latents that all heads share, one for each token. Source: DeepSeek-AI,
"DeepSeek-V2", 2024."""

from __future__ import annotations

from typing import Any

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs

from ..batch import ForwardBatch
from ..linear.linear import Linear, Product
from ..norm import RMSNorm
from ..platform import HeadsOverLatents, LatentPlatform


class LowRankQueries:
    """Queries that are made of a normed product of few numbers."""

    def __init__(self, platform: LatentPlatform, a: Linear, norm: RMSNorm, b: Linear) -> None:
        """a [rank, H], norm [rank], b [Hq D, rank]"""
        self._a = platform.linear(a)
        self._norm = norm
        self._b = platform.linear(b)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, Hq D]"""
        return self.raised(self.compressed(x))

    def compressed(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, rank]"""
        return self._norm(self._a(x))

    def raised(self, compressed: torch.Tensor) -> torch.Tensor:
        """compressed [T, rank] → [T, Hq D]"""
        return self._b(compressed)


class LatentStore:
    """Makes the latents of tokens, and stores them in a layer's cache."""

    def __init__(
        self,
        platform: LatentPlatform,
        kv_a: Linear,
        cos_sin: torch.Tensor,
        *,
        num_heads: int,
        norm: torch.Tensor,
        eps: float,
        pairs: RotaryPairs,
    ) -> None:
        """kv_a [width, H] makes latents before norm [rank] and positions; num_heads: heads of
        queries; cos_sin as in `LatentPlatform`."""
        self._platform = platform
        self._kv_a = platform.linear(kv_a)
        self._cos_sin = cos_sin
        self._num_heads = num_heads
        self._norm = norm
        self._eps = eps
        self._pairs = pairs
        self.width = len(norm) + pairs.width

    def __call__(
        self, q: torch.Tensor, x: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor
    ) -> torch.Tensor:
        """Queries q [T, Hq D], before positions, of tokens x [T, H] → [T, Hq, D]; latents go to the
        cache [num_blocks, block_size, width]."""
        q = q.view(len(x), self._num_heads, -1)
        self._platform.store_latents(
            q,
            self._kv_a(x),
            batch,
            self._cos_sin,
            cache,
            norm=self._norm,
            eps=self._eps,
            pairs=self._pairs,
        )
        return q


class LatentAttention:
    """Attention over latents, with the methods of `Attention`."""

    def __init__(
        self, queries: Product, store: LatentStore, attention: HeadsOverLatents, o: Product
    ) -> None:
        """`queries` makes x [T, H] to [T, Hq D]; o [H, Hq · value_dim]."""
        self._queries = queries
        self._store = store
        self._attention = attention
        self._o = o

    def queries(self, x: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, Hq, D]; latents go to the layer's cache [num_blocks, block_size,
        width]."""
        return self._store(self._queries(x), x, batch, cache)

    def attend(
        self, queries: torch.Tensor, cache: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        """queries [E, Hq, D] of the tokens in the plan → [E, H]"""
        return self._o(self._attention(queries, cache, attention_plan))

    def kept(self, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The queries of some tokens alone, integers [E]."""
        return queries.index_select(0, tokens)
