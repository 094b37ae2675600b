"""Norms, factors and zeros between the projection to queries, keys and values and the heads that
these are divided into."""

from __future__ import annotations

from typing import Protocol

import torch

from ..weights.model_config import ModelConfig
from .linear.kinds import Weights
from .norm import WidthNorm
from .platform import Platform


class ProjectionNorms(Protocol):
    def __call__(self, projected: torch.Tensor) -> torch.Tensor:
        """Product of T tokens with the layer's projections → [T, (Hq + 2 Hk) D]"""


class WidthNorms:
    """Norms of all queries and of all keys of a token. Source: OLMo 2."""

    def __init__(self, q_norm: WidthNorm, k_norm: WidthNorm) -> None:
        self._q_norm = q_norm
        self._k_norm = k_norm

    def __call__(self, projected: torch.Tensor) -> torch.Tensor:
        """[T, (Hq + 2 Hk) D] → the same shape"""
        sizes = [self._q_norm.size, self._k_norm.size, self._k_norm.size]
        q, k, v = torch.split(projected, sizes, dim=1)
        return torch.cat((self._q_norm(q), self._k_norm(k), v), dim=1)


class ValueNorms:
    """Norms of values by head, without factors. Source: Gemma 4."""

    def __init__(
        self, platform: Platform, sizes: tuple[int, int], head_dim: int, eps: float
    ) -> None:
        """sizes: numbers of all queries and of all keys of a token."""
        self._platform = platform
        self._num_kept = sum(sizes)
        self._kv_width = sizes[1]
        self._factors = torch.ones(head_dim, dtype=torch.float32, device=platform.device)
        self._eps = eps

    def __call__(self, projected: torch.Tensor) -> torch.Tensor:
        """[T, (Hq + 2 Hk) D], or [T, (Hq + Hk) D] where values are keys before their norm → [T,
        (Hq + 2 Hk) D]"""
        values = projected[:, -self._kv_width :].contiguous().view(-1, len(self._factors))
        normed = self._platform.rms_norm(values, self._factors, self._eps)
        return torch.cat((projected[:, : self._num_kept], normed.view(len(projected), -1)), dim=1)


class PaddedHeads:
    """Zeros behind the numbers of each head, where values have shorter heads than keys, and a
    factor of values. Zeros change neither a score nor what is attended. Source: MiMo V2 Flash."""

    def __init__(self, config: ModelConfig) -> None:
        self._num_keys = config.num_heads + config.num_kv_heads
        self._num_heads = self._num_keys + config.num_kv_heads
        self._dims = config.projected_dims
        self._head_dim = config.head_dim
        self._scale = config.value_scale

    def __call__(self, projected: torch.Tensor) -> torch.Tensor:
        """Queries and keys of size Dk and values of size Dv, [T, (Hq + Hk) Dk + Hk Dv] → [T, (Hq +
        2 Hk) D]"""
        key_dim, value_dim = self._dims
        num_tokens = len(projected)
        width = self._num_keys * key_dim
        padded = projected.new_zeros(num_tokens, self._num_heads, self._head_dim)
        keys, values = projected[:, :width], projected[:, width:]
        padded[:, : self._num_keys, :key_dim] = keys.view(num_tokens, -1, key_dim)
        scaled = padded[:, self._num_keys :, :value_dim]
        torch.mul(values.view(num_tokens, -1, value_dim), self._scale, out=scaled)
        return padded.flatten(1)

    def cut(self, attended: torch.Tensor) -> torch.Tensor:
        """attended [T, Hq D] → [T, Hq Dv]"""
        heads = attended.view(len(attended), -1, self._head_dim)
        return heads[:, :, : self._dims[1]].flatten(1)


def projection_norms(
    config: ModelConfig, weights: Weights, platform: Platform, prefix: str
) -> ProjectionNorms | None:
    """Returns what changes the product of a layer whose weights have names with a prefix; None:
    nothing does."""
    eps = config.rms_norm_eps
    if config.value_dim:
        return PaddedHeads(config)
    if config.value_norm and config.num_kv_projections:
        q_size, kv_size, *_ = config.qkv_sizes
        return ValueNorms(platform, (q_size, kv_size), config.head_dim, eps)
    if not config.width_norms:
        return None
    return WidthNorms(
        WidthNorm(platform, weights.tensors[prefix + "q_norm"], eps, weights.group),
        WidthNorm(platform, weights.tensors[prefix + "k_norm"], eps, weights.group),
    )
