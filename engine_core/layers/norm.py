"""Root mean square normalization. Source: Zhang and Sennrich, 2019."""

from __future__ import annotations

from typing import cast

import torch

from .linear.linear import Linear, Tokens
from .platform import Platform, RoundingPlatform


class RMSNorm:
    def __init__(self, platform: Platform, weight: torch.Tensor, eps: float) -> None:
        """weight [H]"""
        self.weight = weight
        self._eps = eps
        self._platform = platform

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        return self._platform.rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x in place; the norm of the sum, [T, H]."""
        return self._platform.add_rms_norm(x, residual, self.weight, self._eps)


class InputNorm:
    """The norm that one linear layer reads, as its product reads it."""

    def __init__(
        self, platform: Platform, weight: torch.Tensor, eps: float, reader: Linear
    ) -> None:
        """weight [H]"""
        self.weight = weight
        self._eps = eps
        self._rounds_to = reader.rounds_to
        self._platform = platform
        self._rounding = cast(RoundingPlatform, platform)

    def __call__(self, x: torch.Tensor) -> Tokens:
        """x [T, H] → [T, H]"""
        if self._rounds_to is None:
            return self._platform.rms_norm(x, self.weight, self._eps)
        return self._rounding.rounded_rms_norm(x, self.weight, self._eps, self._rounds_to)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Tokens:
        """residual += x in place; the norm of the sum, [T, H]."""
        if self._rounds_to is None:
            return self._platform.add_rms_norm(x, residual, self.weight, self._eps)
        return self._rounding.rounded_add_rms_norm(
            x, residual, self.weight, self._eps, self._rounds_to
        )
