"""Attention whose result is multiplied by the sigmoid of gates that lie beside the queries. Source:
Qiu et al., "Gated attention for large language models", 2025."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..batch import ForwardBatch
from ..linear.linear import Tokens
from ..platform import GatingPlatform, Platform
from .attention import Attention


class GatedQueries(NamedTuple):
    queries: torch.Tensor
    """[T, Hq, D]"""
    gates: torch.Tensor
    """[T, Hq, D]"""


class GatedAttention:
    """A mixer with the two calls of `Attention`."""

    def __init__(
        self, platform: Platform, attention: Attention, num_heads: int, head_dim: int
    ) -> None:
        """`attention`: its product qkv [(2 Hq + 2 Hk) D, H] has query and gates of each head in
        turn, then keys and values."""
        self._platform = platform
        self._attention = attention
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._gating = platform if isinstance(platform, GatingPlatform) else None

    def queries(self, x: Tokens, batch: ForwardBatch, kv_cache: torch.Tensor) -> GatedQueries:
        """x [T, H]; keys and values go to the layer's kv_cache [2, num_blocks, Hk, block_size,
        D]."""
        product = self._attention.product(x)
        width = self._num_heads * self._head_dim
        heads = product[:, : 2 * width].view(-1, self._num_heads, 2, self._head_dim)
        gates = heads[:, :, 1]
        if self._gating is not None:
            queries = self._attention.stored(product, batch, kv_cache, has_gates=True)
            return GatedQueries(queries, gates)
        qkv = torch.cat((heads[:, :, 0].flatten(1), product[:, 2 * width :]), dim=1)
        return GatedQueries(self._attention.stored(qkv, batch, kv_cache), gates)

    def attend(
        self, queries: GatedQueries, kv_cache: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        """Queries of the E tokens of the plan → [E, H]"""
        attended = self._attention.attended(queries.queries, kv_cache, attention_plan)
        if self._gating is not None:
            return self._attention.projected(self._gating.gate_heads(attended, queries.gates))
        shares = self._platform.activation(queries.gates.flatten(1), "sigmoid")
        return self._attention.projected(attended * shares)

    def kept(self, queries: GatedQueries, tokens: torch.Tensor) -> GatedQueries:
        """The queries of some tokens alone, integers [E]."""
        return GatedQueries(*(each.index_select(0, tokens) for each in queries))
