"""Attention over the latents that a sparse indexer chooses. Source: DeepSeek-AI, "DeepSeek-V3.2",
2025."""

from __future__ import annotations

from typing import Any

import torch

from ..batch import ForwardBatch
from ..linear.linear import Product
from ..platform import HeadsOverChosen, IndexedQueries
from .indexer import Indexer, SharedIndexer
from .latent_attention import LatentStore, LowRankQueries


class IndexedAttention:
    """Attention over chosen latents, with the methods of `Attention`. A layer's cache [num_blocks,
    block_size, width + index D] has the latent of a token, and behind it the key of the indexer."""

    def __init__(
        self,
        queries: LowRankQueries,
        store: LatentStore,
        indexer: Indexer | SharedIndexer,
        attention: HeadsOverChosen,
        o: Product,
    ) -> None:
        """o [H, Hq · value_dim]"""
        self._queries = queries
        self._store = store
        self._indexer = indexer
        self._attention = attention
        self._o = o

    def queries(self, x: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> IndexedQueries:
        """x [T, H] → queries of T tokens; latents and keys of the indexer go to the layer's
        cache."""
        width = self._store.width
        compressed = self._queries.compressed(x)
        heads = self._store(self._queries.raised(compressed), x, batch, cache[..., :width])
        return IndexedQueries(
            heads, *self._indexer.queries(x, compressed, batch, cache[..., width:])
        )

    def attend(
        self, queries: IndexedQueries, cache: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        """Queries of the E tokens that the plan speaks of → [E, H]"""
        return self._o(self._attention(queries, cache, attention_plan))

    def kept(self, queries: IndexedQueries, tokens: torch.Tensor) -> IndexedQueries:
        """The queries of some tokens alone, integers [E]."""
        return IndexedQueries(*(each.index_select(0, tokens) for each in queries))
