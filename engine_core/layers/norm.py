"""Normalization by the root mean square, by mean and variance, or none. Sources: Zhang and
Sennrich, 2019; Ba et al., 2016."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch.nn.functional import layer_norm

from .linear.linear import Linear, Tokens
from .platform import Platform, RoundingPlatform, RowSumPlatform
from .process_group import Group


class Norm(Protocol):
    """A norm of the residual stream before a layer reads it."""

    def __call__(self, x: torch.Tensor) -> Tokens:
        """x [T, H] → [T, H]"""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Tokens:
        """residual += x in place; the norm of the sum, [T, H]."""


class RMSNorm:
    def __init__(self, platform: Platform, weight: torch.Tensor, eps: float) -> None:
        """weight [H]"""
        self.weight = weight
        self.eps = eps
        self._platform = platform

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        return self._platform.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x in place; the norm of the sum, [T, H]."""
        return self._platform.add_rms_norm(x, residual, self.weight, self.eps)


class GroupNorm:
    """Equal groups of a row, each divided by its root mean square, times factors of the row."""

    def __init__(
        self, platform: Platform, weight: torch.Tensor, eps: float, num_groups: int
    ) -> None:
        """weight [H]"""
        self._weight = weight
        self._norm = RMSNorm(platform, weight.new_ones(len(weight) // num_groups), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        groups = x.view(-1, len(self._norm.weight))
        return self._norm(groups).view_as(x) * self._weight


class InputNorm:
    """The norm before one linear layer, with its result rounded as that layer's product reads
    it."""

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


class LayerNorm:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        """weight and bias [H]"""
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x in place; the norm of the sum, [T, H]."""
        return self(residual.add_(x))


class NoNorm:
    """Takes the place of a norm that a model does not have."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(x)


class WidthNorm:
    """The root mean square norm over all heads of a token, of which ranks have a part each."""

    def __init__(self, platform: Platform, weight: torch.Tensor, eps: float, group: Group) -> None:
        """weight [N] of this rank's numbers"""
        self.size = len(weight)
        self._row_sum = platform.row_sum if isinstance(platform, RowSumPlatform) else _row_sum
        self._weight = weight.float()
        self._eps = eps
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N] → [T, N]"""
        wide = x.float()
        # Sums of squares of a rank: the ranks add few numbers, in their order.
        squares = self._group.sum(self._row_sum(wide.square())[:, None])
        mean = squares / (x.shape[1] * self._group.size)
        return (wide * torch.rsqrt(mean + self._eps) * self._weight).to(x.dtype)


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


class ScaledNorm:
    """The norm of a residual stream that is multiplied by a factor."""

    def __init__(self, norm: Norm, factor: torch.Tensor) -> None:
        """factor [1]"""
        self._norm = norm
        self._factor = factor

    def __call__(self, x: torch.Tensor) -> Tokens:
        """x [T, H] → [T, H]"""
        return self._norm(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Tokens:
        """residual = (residual + x) * factor in place; its norm, [T, H]."""
        return self._norm(residual.add_(x).mul_(self._factor))
