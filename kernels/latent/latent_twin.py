"""Latent attention in plain torch: the specification of kernels for it. Source: DeepSeek-AI,
"DeepSeek-V2", 2024.

A latent of a token is its compressed keys and values, normed [rank], and behind them a key with a
position, rotated [rotary]; all heads share it. Queries are absorbed: they meet latents, not keys.
"""

from __future__ import annotations

import torch

from ..attention.rotary_pairs import RotaryPairs


def store_latents_twin(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
    pairs: RotaryPairs,
) -> torch.Tensor:
    """Queries q [T, Hq, D] with their last numbers rotated, in float32 or better; the latents of kv
    [T, width] go to cache [num_blocks, block_size, width], rounded to its dtype. Rotated numbers
    stay in their places."""
    rank = len(norm)
    wide = kv.to(torch.promote_types(kv.dtype, torch.float32))
    compressed = wide[:, :rank]
    factors = torch.rsqrt(compressed.square().mean(-1, keepdim=True) + eps)
    key = rotated(wide[:, None, rank:], positions, cos_sin, pairs)[:, 0]
    latents = torch.cat((compressed * factors * norm, key), 1)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = latents.to(cache.dtype)
    plain = q.shape[2] - pairs.width
    heads = q.to(wide.dtype)
    return torch.cat(
        (heads[..., :plain], rotated(heads[..., plain:], positions, cos_sin, pairs)), 2
    )


def latent_attention_twin(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_len: int,
    *,
    rotary: int,
    scale: float,
) -> torch.Tensor:
    """Attention of the last len(q) positions of one sequence of `seq_len` latents → [C, Hq, value],
    in float32 or better. q [C, Hq, numbers without a position + rotary]; kv_b [Hq, numbers without
    a position + value, rank]: W_UK and W_UV of each head."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    rank = kv_b.shape[2]
    plain = q.shape[2] - rotary
    blocks = block_table[: -(-seq_len // cache.shape[1])].long()
    latents = cache[blocks].flatten(0, 1)[:seq_len].to(dtype)
    up = kv_b.to(dtype)
    heads = q.to(dtype)
    absorbed = torch.einsum("chd,hdr->chr", heads[..., :plain], up[:, :plain])
    scores = torch.einsum("chr,nr->chn", absorbed, latents[:, :rank])
    scores += torch.einsum("chd,nd->chn", heads[..., plain:], latents[:, rank:])
    positions = torch.arange(seq_len - len(q), seq_len, device=q.device)
    hidden = torch.arange(seq_len, device=q.device) > positions[:, None]
    scores = (scores * scale).masked_fill(hidden[:, None], -torch.inf)
    attended = torch.einsum("chn,nr->chr", scores.softmax(-1), latents[:, :rank])
    return torch.einsum("chr,hvr->chv", attended, up[:, plain:])


def rotated(
    heads: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, pairs: RotaryPairs
) -> torch.Tensor:
    """heads [T, N, rotary]"""
    order = pairs.order(heads.shape[-1]).to(heads.device)
    low, high = heads[..., order].chunk(2, 2)
    cos, sin = cos_sin[positions].to(heads.dtype)[:, None].chunk(2, 2)
    rotated = torch.empty_like(heads)
    rotated[..., order] = torch.cat((low * cos - high * sin, high * cos + low * sin), 2)
    return rotated
