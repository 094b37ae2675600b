"""Attention of whole texts on a CPU, one text after another by the library's kernel, so that a text
has the same bits in any batch. Twin: `kernels.attention.mutual_attention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

QUERIES = 512
"""Queries at once where scores have biases: those of all queries of a text of 8,192 tokens would
take gigabytes."""


def mutual_attention(
    qkv: torch.Tensor,
    counts: Sequence[int],
    head_dim: int,
    distance_bias: torch.Tensor | None = None,
    attended: Sequence[int] = (),
) -> torch.Tensor:
    """See `mutual_attention_twin`."""
    # [3, 1, Hq, T, D]
    parts = qkv.unflatten(1, (3, -1, head_dim)).permute(1, 2, 0, 3).unsqueeze(1)
    out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)
    mask_of = None if distance_bias is None else _Masks(distance_bias, max(counts), qkv.dtype)
    first = 0
    for count, num_keys in zip(counts, attended or counts, strict=True):
        q = parts[0, ..., first : first + count, :]
        k, v = parts[1:, ..., first : first + num_keys, :]
        queries_at_once = count if mask_of is None else QUERIES
        for start in range(0, count, queries_at_once):
            num_queries = min(queries_at_once, count - start)
            mask = None if mask_of is None else mask_of(start, num_queries, num_keys)
            queries = q[:, :, start : start + num_queries]
            values = scaled_dot_product_attention(queries, k, v, attn_mask=mask)
            rows = slice(first + start, first + start + num_queries)
            out[rows] = values[0].transpose(0, 1).flatten(1)
        first += count
    return out


class _Masks:
    """Biases of some queries of a text and its keys. Those of first queries are made once."""

    def __init__(self, distance_bias: torch.Tensor, max_count: int, dtype: torch.dtype) -> None:
        self._distance_bias = distance_bias
        self._dtype = dtype
        self._first = self._made(0, min(QUERIES, max_count), max_count)

    def __call__(self, start: int, num_queries: int, num_keys: int) -> torch.Tensor:
        """[1, Hq, num_queries, num_keys]"""
        if start:
            return self._made(start, num_queries, num_keys)
        return self._first[:, :, :num_queries, :num_keys]

    def _made(self, start: int, num_queries: int, count: int) -> torch.Tensor:
        queries = torch.arange(start, start + num_queries)
        columns = torch.arange(count)[None] - queries[:, None] + self._distance_bias.shape[1] // 2
        return self._distance_bias[None, :, columns].to(self._dtype)
