"""Grouped-query attention over the KV cache, with rotary positions. Sources: Vaswani et al., 2017;
Ainslie et al., 2023."""

from __future__ import annotations

from typing import Any

import torch

from .batch import ForwardBatch
from .linear.linear import Linear, Tokens
from .platform import Platform


class Attention:
    """In two parts, so that a model's last layer can leave out queries that are of no use."""

    def __init__(
        self,
        platform: Platform,
        qkv: Linear,
        o: Linear,
        cos_sin: torch.Tensor,
        *,
        qkv_bias: torch.Tensor | None = None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float,
        scale: float | None = None,
        window: int = 0,
    ) -> None:
        """qkv [(Hq + 2 Hk) D, H] makes queries, keys and values; o [H, Hq D]; cos_sin as
        `rope.cos_sin_table` makes it; bias [(Hq + 2 Hk) D]; norms [D] of each query and key head;
        scale and window as in `Platform.attention`."""
        self.qkv = qkv
        self.o = o
        self.qkv_bias = qkv_bias
        self.q_norm = q_norm
        self.k_norm = k_norm
        self._platform = platform
        self._cos_sin = cos_sin
        self._eps = eps
        self._scale = scale
        self._window = window
        self._qkv = platform.linear(qkv)
        self._o = platform.linear(o)

    def queries(self, x: Tokens, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, Hq, D]; keys and values go to the layer's kv_cache [2, num_blocks, Hk,
        block_size, D]."""
        return self._platform.qk_norm_rope_store_kv(
            self._qkv(x),
            batch,
            self._cos_sin,
            kv_cache,
            bias=self.qkv_bias,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self._eps,
        )

    def attend(
        self, queries: torch.Tensor, kv_cache: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        """queries [E, Hq, D], those that the plan speaks of → [E, H]"""
        attended = self._platform.attention(
            queries, kv_cache, attention_plan, scale=self._scale, window=self._window
        )
        return self._o(attended)
