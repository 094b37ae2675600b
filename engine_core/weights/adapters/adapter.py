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
    # The sum takes a fourth of the time, and is finite unless a number is not, or all are huge.
    total = float(tensor.sum(dtype=torch.float32))
    return math.isfinite(total) or bool(torch.isfinite(tensor).all())
