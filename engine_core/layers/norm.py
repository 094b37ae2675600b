"""Root mean square normalization. Source: Zhang and Sennrich, 2019."""

from __future__ import annotations

import torch

from .platform import Platform


class RMSNorm:
    def __init__(self, platform: Platform, weight: torch.Tensor, eps: float) -> None:
        """weight [H]"""
        self.weight, self._eps = weight, eps
        self._platform = platform

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        return self._platform.rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x in place; the norm of the sum, [T, H]."""
        return self._platform.add_rms_norm(x, residual, self.weight, self._eps)
