"""Sparse indexers: small attention that chooses which latents a token attends to. Source: DeepSeek-AI,
"DeepSeek-V3.2", 2025.

The published code rotates queries and keys by a Hadamard matrix, which leaves their products as they
are, and rounds them to 8 bits; here they keep the model's dtype.
"""

from __future__ import annotations

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs

from ..batch import ForwardBatch
from ..linear.linear import Linear
from ..platform import IndexPlatform


class Indexer:
    """The indexer of a layer."""

    def __init__(
        self,
        platform: IndexPlatform,
        q: Linear,
        k: Linear,
        head_weights: Linear,
        cos_sin: torch.Tensor,
        *,
        norm: torch.Tensor,
        norm_bias: torch.Tensor,
        eps: float,
        num_heads: int,
        pairs: RotaryPairs,
    ) -> None:
        """q [Hi D, query rank]; k [D, H] makes keys before a norm by mean and variance, norm and
        norm_bias [D], and positions; head_weights float32 [Hi, H]; cos_sin as in
        `IndexPlatform.store_index_keys`."""
        self._platform = platform
        self._q = platform.linear(q)
        self._k = platform.linear(k)
        self._head_weights = platform.linear(head_weights)
        self._num_heads = num_heads
        self._cos_sin = cos_sin
        self._norm = norm
        self._norm_bias = norm_bias
        self._eps = eps
        self._pairs = pairs

    def queries(
        self, x: torch.Tensor, compressed: torch.Tensor, batch: ForwardBatch, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] and its compressed queries [T, query rank] → queries [T, Hi, D], and weights of
        heads, float32 [T, Hi]. Keys go to the layer's keys [num_blocks, block_size, D]."""
        q = self._q(compressed).view(len(x), self._num_heads, -1)
        self._platform.store_index_keys(
            q,
            self._k(x),
            batch,
            self._cos_sin,
            keys,
            norm=self._norm,
            bias=self._norm_bias,
            eps=self._eps,
            pairs=self._pairs,
        )
        # The published factor of weights is left out: it changes no order of scores.
        return q, self._head_weights(x.float())
