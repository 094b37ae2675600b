"""Two products with a gate between them, or an activation. Source: Shazeer, "GLU variants improve
transformer", 2020."""

from __future__ import annotations

from typing import cast

import torch

from ..weights.model_config import GATES, SQUARED_RELU
from .linear.linear import Linear, Tokens
from .platform import Platform, RoundingPlatform


class Mlp:
    """down(activation(gates) * ups). One launch makes gates, ups and their product where the
    platform has such a kernel for the kind of `gate_up`."""

    def __init__(self, platform: Platform, gate_up: Linear, down: Linear, activation: str) -> None:
        """gate_up [2 I, H], gates first; down [H, I]; activation as in `Platform.gate` or
        `Platform.activation`."""
        self.gate_up = gate_up
        self.down = down
        self._platform = platform
        self._activation = activation
        is_gate = activation in GATES
        self._fused = platform.gated_linear(gate_up, activation) if is_gate else None
        self._product = platform.linear(gate_up)
        self._down = platform.linear(down)

    def __call__(self, x: Tokens) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        return self._down(self._gated(x) if self._fused is None else self._fused(x))

    def _gated(self, x: Tokens) -> Tokens:
        """x [T, H] → [T, I], as `down` reads it."""
        product = self._product(x)
        if self._activation not in GATES:
            gates, ups = product.chunk(2, dim=1)
            return self._platform.activation(gates.contiguous(), self._activation) * ups
        rounds_to = self.down.rounds_to
        if rounds_to is None:
            return self._platform.gate(product, self._activation)
        return cast(RoundingPlatform, self._platform).rounded_gate(
            product, self._activation, rounds_to
        )


class ScaledMlp:
    """down(activation(factor * gates) * ups) * factor"""

    def __init__(
        self,
        platform: Platform,
        gate_up: Linear,
        down: Linear,
        activation: str,
        gate_factor: float,
        down_factor: float,
    ) -> None:
        """gate_up [2 I, H], gates first; down [H, I]; activation as in `Platform.gate`."""
        self._platform = platform
        self._activation = activation
        self._gate_factor = gate_factor
        self._down_factor = down_factor
        self._product = platform.linear(gate_up)
        self._down = platform.linear(down)

    def __call__(self, x: Tokens) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        product = self._product(x)
        product[:, : product.shape[1] // 2] *= self._gate_factor
        return self._down(self._platform.gate(product, self._activation)) * self._down_factor


class PlainMlp:
    """down(activation(up(x)))"""

    def __init__(self, platform: Platform, up: Linear, down: Linear, activation: str) -> None:
        """up [I, H]; down [H, I]; activation as in `activated`."""
        self._platform = platform
        self._activation = activation
        self._up = platform.linear(up)
        self._down = platform.linear(down)

    def __call__(self, x: Tokens) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        return self._down(activated(self._platform, self._up(x), self._activation))


class NoMlp:
    """The place of an MLP in a layer that is a mixer alone."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def activated(platform: Platform, x: torch.Tensor, activation: str) -> torch.Tensor:
    """x, contiguous → the same shape and dtype; activation as in `Platform.activation`, or the
    square of relu, which is rounded once."""
    if activation != SQUARED_RELU:
        return platform.activation(x, activation)
    positive = platform.activation(x, "relu")
    return positive * positive
