"""Attention of a decoder's shapes in which all tokens of a text see each other, without a cache:
grouped queries, norms of heads, rotary positions, windows to both sides. Sources: Su et al.,
"RoFormer", 2021; Vera et al., "EmbeddingGemma", 2025."""

from __future__ import annotations

from typing import Any

import torch

from ..linear.linear import Linear, Tokens
from ..platform import EncoderPlatform

FAR = -1e5
"""Score of a key outside the window. It is finite, so that a softmax whose first keys are all
outside has no NaN; its share is zero as soon as a key inside follows."""


class BothWaysAttention:
    def __init__(
        self,
        platform: EncoderPlatform,
        qkv: Linear,
        o: Linear,
        cos_sin: torch.Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        qkv_bias: torch.Tensor | None = None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float,
        scale: float | None = None,
        window: int = 0,
        max_len: int,
    ) -> None:
        """Like `Attention`. A token sees those less than `window` positions away; 0: all. max_len:
        tokens of the longest text."""
        self._platform = platform
        self._heads = [num_heads, num_kv_heads, num_kv_heads]
        self._head_dim = cos_sin.shape[1]
        self._cos_sin = cos_sin
        self._qkv_bias = qkv_bias
        self._norms = (q_norm, k_norm)
        self._eps = eps
        # The platform's scale is 1 / sqrt(D).
        self._query_scale = 1.0 if scale is None else scale * self._head_dim**0.5
        self._window_bias = _window_bias(window, max_len, num_heads, cos_sin.device)
        self._qkv = platform.linear(qkv)
        self._o = platform.linear(o)

    def __call__(self, x: Tokens, texts: Any, positions: torch.Tensor) -> torch.Tensor:
        """x [T, H], the platform's plan of the texts and positions int64 [T] → [T, H]"""
        product = self._qkv(x)
        if self._qkv_bias is not None:
            product = product + self._qkv_bias
        heads = product.view(len(product), -1, self._head_dim)
        parts = torch.split(heads, list(self._heads), 1)
        queries, keys = (self._rotated(parts[i], positions, self._norms[i]) for i in (0, 1))
        queries = queries * self._query_scale
        num_shared = self._heads[0] // self._heads[1]
        shared = [each.repeat_interleave(num_shared, 1) for each in (keys, parts[2].float())]
        qkv = torch.cat([queries, *shared], 1).flatten(1).to(product.dtype)
        attended = self._platform.mutual_attention(qkv, texts, self._head_dim, self._window_bias)
        return self._o(attended)

    def _rotated(
        self, heads: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """heads [T, N, D] → float32 [T, N, D]"""
        wide = heads.float()
        if norm is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
            wide = wide * norm.float()
        cos, sin = self._cos_sin[positions][:, None].chunk(2, 2)
        first, second = wide.chunk(2, 2)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], 2)


def _window_bias(
    window: int, max_len: int, num_heads: int, device: torch.device
) -> torch.Tensor | None:
    """float32 [Hq, 2 max_len − 1], as `distance_bias` has it; None: every key is inside."""
    if not window or window >= max_len:
        return None
    distances = torch.arange(-(max_len - 1), max_len, device=device).abs()
    bias = torch.where(distances < window, 0.0, FAR)
    return bias.expand(num_heads, -1).contiguous()
