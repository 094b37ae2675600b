"""An adapter in host memory: low-rank factors by layer of the model, and the hash of its
content."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LowRank:
    """Factors of one projection: it adds `factor` * (x Aᵀ) Bᵀ to the projection's outputs."""

    a: torch.Tensor
    """[r, K]"""
    b: torch.Tensor
    """[N, r]"""
    factor: float

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a, self.b


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    digest: bytes
    """Hash of its files."""
    rank: int
    """The highest of its projections."""
    projections: Mapping[tuple[str, int], LowRank]
    """Keyed by the layer's name in the model's layout, and the place of the projection among those
    that are joined in the layer."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether each number is finite."""
    # Both are nan where a number is. Sums, or a mask, of 16-bit numbers take six times as long.
    least, most = torch.aminmax(tensor)
    return math.isfinite(least) and math.isfinite(most)
