"""Norms between the projection to queries, keys and values and the heads that these are divided
into."""

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


def projection_norms(
    config: ModelConfig, weights: Weights, platform: Platform, prefix: str
) -> ProjectionNorms | None:
    """Norms of a layer whose weights have names with a prefix; None: it has none."""
    eps = config.rms_norm_eps
    if config.value_norm and config.num_kv_projections:
        q_size, kv_size, *_ = config.qkv_sizes
        return ValueNorms(platform, (q_size, kv_size), config.head_dim, eps)
    if not config.width_norms:
        return None
    return WidthNorms(
        WidthNorm(weights.tensors[prefix + "q_norm"], eps, weights.group),
        WidthNorm(weights.tensors[prefix + "k_norm"], eps, weights.group),
    )
