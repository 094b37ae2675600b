"""Attention of whole texts on a CPU, one text after another by the library's kernel, so that a text
has the same bits in any batch. Twin: `kernels.attention.mutual_attention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


def mutual_attention(
    qkv: torch.Tensor,
    counts: Sequence[int],
    head_dim: int,
    distance_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `mutual_attention_twin`."""
    # [3, 1, Hq, T, D]
    parts = qkv.unflatten(1, (3, -1, head_dim)).permute(1, 2, 0, 3).unsqueeze(1)
    out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)
    masks = None if distance_bias is None else _masks(distance_bias, max(counts)).to(qkv.dtype)
    first = 0
    for count in counts:
        q, k, v = parts[..., first : first + count, :]
        mask = None if masks is None else masks[:, :, :count, :count]
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out[first : first + count] = attended[0].transpose(0, 1).flatten(1)
        first += count
    return out


def _masks(distance_bias: torch.Tensor, max_count: int) -> torch.Tensor:
    """[1, Hq, max_count, max_count] biases of each query and key."""
    places = torch.arange(max_count)
    columns = places[None] - places[:, None] + distance_bias.shape[1] // 2
    return distance_bias[None, :, columns]
