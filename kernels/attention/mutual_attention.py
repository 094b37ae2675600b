"""Attention of whole texts whose tokens see each other, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def mutual_attention_twin(
    qkv: torch.Tensor,
    counts: Sequence[int],
    head_dim: int,
    distance_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """qkv [T, 3 Hq D] of texts of counts[i] tokens → [T, Hq D]. Scores are scaled by 1 / sqrt(D).
    distance_bias [Hq, 2 L − 1] is added to them: column L − 1 + d is that of a key d positions
    behind its query."""
    outs = []
    for text in torch.split(qkv.double(), list(counts)):
        q, k, v = text.unflatten(1, (3, -1, head_dim)).permute(1, 2, 0, 3)
        scores = q @ k.transpose(1, 2) * head_dim**-0.5
        if distance_bias is not None:
            places = torch.arange(len(text), device=qkv.device)
            columns = places[None] - places[:, None] + distance_bias.shape[1] // 2
            scores = scores + distance_bias.double()[:, columns]
        outs.append((torch.softmax(scores, 2) @ v).transpose(0, 1).flatten(1))
    return torch.cat(outs).to(qkv.dtype)
