"""Sparse indexers in plain torch: the specification of kernels for them. Source: DeepSeek-AI,
"DeepSeek-V3.2", 2025.

Each head of a token's indexer meets one key of each token; the products that are positive are
added, each times its head's weight, and the latents of the highest sums are those that the token
attends to.
"""

from __future__ import annotations

import torch

from ..attention.rotary_pairs import RotaryPairs
from .latent_twin import rotated


def store_index_keys_twin(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    keys: torch.Tensor,
    *,
    norm: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    pairs: RotaryPairs,
) -> torch.Tensor:
    """Queries q [T, Hi, D] with their first numbers rotated, in float32 or better; keys of k [T,
    D], normed and rotated, go to keys [num_blocks, block_size, D], rounded to its dtype."""
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    factors = norm.to(wide.dtype), bias.to(wide.dtype)
    normed = torch.nn.functional.layer_norm(wide, norm.shape, *factors, eps)
    stored = _rotated_first(normed[:, None], positions, cos_sin, pairs)[:, 0]
    keys[slots // keys.shape[1], slots % keys.shape[1]] = stored.to(keys.dtype)
    return _rotated_first(q.to(wide.dtype), positions, cos_sin, pairs)


def index_scores_twin(
    q: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Scores [C, n] of n keys [n, D] for queries q [C, Hi, D] and weights of heads [C, Hi], in
    float32 or better."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    products = torch.einsum("chd,nd->chn", q.to(dtype), keys.to(dtype)).relu()
    return torch.einsum("ch,chn->cn", head_weights.to(dtype), products)


def chosen_twin(scores: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Positions of the highest of scores [n], in their order; of equal ones the first are
    higher."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:num_chosen].sort().values


def _rotated_first(
    heads: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, pairs: RotaryPairs
) -> torch.Tensor:
    """heads [T, N, D]"""
    first = rotated(heads[..., : pairs.width], positions, cos_sin, pairs)
    return torch.cat((first, heads[..., pairs.width :]), 2)
