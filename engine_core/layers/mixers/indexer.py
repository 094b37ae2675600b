"""Sparse indexers: small attention that chooses which latents a token attends to. Source:
DeepSeek-AI, "DeepSeek-V3.2", 2025.

The published code rotates queries and keys by a Hadamard matrix, which leaves their products as
they are, and rounds them to 8 bits; here they keep the model's dtype."""

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
        self._latest: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def queries(
        self, x: torch.Tensor, compressed: torch.Tensor, batch: ForwardBatch, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] and its compressed queries [T, query rank] → queries [T, Hi, D], and weights of
        heads, float32 [T, Hi]. Keys go to the layer's keys [num_blocks, block_size, D]."""
        q = self._q(compressed).view(len(x), self._num_heads, -1)
        k = self._k(x)
        self._store(q, k, batch, keys)
        # The published factor of weights is left out: it changes no order of scores.
        weights = self._head_weights(x.float())
        self._latest = q, k, weights
        return q, weights

    def latest(self, batch: ForwardBatch, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and weights of the last call of `queries`, for the same batch. Stores that call's
        keys in `keys`, the cache of this layer."""
        assert self._latest is not None
        q, k, weights = self._latest
        self._store(q[:, :0], k, batch, keys)
        return q, weights

    def _store(
        self, q: torch.Tensor, k: torch.Tensor, batch: ForwardBatch, keys: torch.Tensor
    ) -> None:
        self._platform.store_index_keys(
            q,
            k,
            batch,
            self._cos_sin,
            keys,
            norm=self._norm,
            bias=self._norm_bias,
            eps=self._eps,
            pairs=self._pairs,
        )


class SharedIndexer:
    """The indexer of an earlier layer, whose choice this layer shares. Its keys are stored for this
    layer too, and the choice is made again."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer

    def queries(
        self, x: torch.Tensor, compressed: torch.Tensor, batch: ForwardBatch, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Indexer.queries`; that of the earlier layer is called before, for the same batch."""
        return self._indexer.latest(batch, keys)
