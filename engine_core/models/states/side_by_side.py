"""Layers with Mamba-2 and attention side by side, which read one norm, as two layers: Mamba-2, then
attention with the MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...layers.linear.linear import Tokens
from ...layers.norm import Norm
from .. import layered


class SharedNorm:
    """The norm of Mamba-2's input, which attention reads, too."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm
        self._normed: Tokens | None = None

    def __call__(self, x: torch.Tensor) -> Tokens:
        """x [T, H] → [T, H]"""
        self._normed = self._norm(x)
        return self._normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Tokens:
        """residual += x in place; the norm of the sum, [T, H]."""
        self._normed = self._norm.add(x, residual)
        return self._normed

    def take(self) -> Tokens:
        """The last result; it is kept no longer."""
        assert self._normed is not None
        normed, self._normed = self._normed, None
        return normed


class NormedBefore:
    """The place of the norm of attention's input: adds to the residual stream, and returns what the
    norm of Mamba-2's input made before that."""

    def __init__(self, shared: SharedNorm) -> None:
        self._shared = shared

    def __call__(self, x: torch.Tensor) -> Tokens:
        """x [T, H] → [T, H]"""
        return self._shared.take()

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Tokens:
        """residual += x in place; [T, H]."""
        residual += x
        return self._shared.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaLayer(layered.Layer):
    scale: float

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer(layered.Layer):
    post_norm: Norm
    scale: float

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.post_norm.add(x * self.scale, residual))
