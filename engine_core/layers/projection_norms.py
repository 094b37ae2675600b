"""Norms, factors and zeros between the projection to queries, keys and values and the heads that
these are divided into."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import pad

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
    """Zeros behind the numbers of each head, where values have shorter heads than keys, and a factor
    of values. Zeros change neither a score nor what is attended. Source: MiMo V2 Flash."""

    def __init__(self, config: ModelConfig) -> None:
        key_dim, value_dim = config.projected_dims
        self._sizes = config.qkv_sizes
        self._num_zeros = config.head_dim - key_dim, config.head_dim - value_dim
        self._dims = key_dim, value_dim
        self._scale = config.value_scale

    def __call__(self, projected: torch.Tensor) -> torch.Tensor:
        """Queries and keys of size Dk and values of size Dv, [T, (Hq + Hk) Dk + Hk Dv] → [T, (Hq +
        2 Hk) D]"""
        *queries_and_keys, num_values = self._sizes
        keys, values = torch.split(projected, [sum(queries_and_keys), num_values], dim=1)
        parts = keys.contiguous(), values * self._scale
        heads = [
            pad(part.view(len(part), -1, dim), (0, num_zeros))
            for part, dim, num_zeros in zip(parts, self._dims, self._num_zeros, strict=True)
        ]
        return torch.cat(heads, dim=1).flatten(1)

    def cut(self, attended: torch.Tensor) -> torch.Tensor:
        """attended [T, Hq D] → [T, Hq Dv]"""
        head_dim = self._dims[1] + self._num_zeros[1]
        return attended.view(len(attended), -1, head_dim)[:, :, : self._dims[1]].flatten(1)


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
        WidthNorm(weights.tensors[prefix + "q_norm"], eps, weights.group),
        WidthNorm(weights.tensors[prefix + "k_norm"], eps, weights.group),
    )
