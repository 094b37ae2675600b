"""Two products with a gate between them. Source: Shazeer, "GLU variants improve transformer",
2020."""

from __future__ import annotations

from typing import cast

import torch

from .linear.linear import Linear, Tokens
from .platform import Platform, RoundingPlatform


class Mlp:
    """down(activation(gates) * ups). One launch makes gates, ups and their product where the
    platform has such a kernel for the kind of `gate_up`."""

    def __init__(self, platform: Platform, gate_up: Linear, down: Linear, activation: str) -> None:
        """gate_up [2 I, H], gates first; down [H, I]; activation as in `Platform.gate`."""
        self.gate_up = gate_up
        self.down = down
        self._platform = platform
        self._activation = activation
        self._fused = platform.gated_linear(gate_up, activation)
        self._product = platform.linear(gate_up)
        self._down = platform.linear(down)

    def __call__(self, x: Tokens) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        return self._down(self._gated(x) if self._fused is None else self._fused(x))

    def _gated(self, x: Tokens) -> Tokens:
        """x [T, H] → [T, I], as `down` reads it."""
        product = self._product(x)
        rounds_to = self.down.rounds_to
        if rounds_to is None:
            return self._platform.gate(product, self._activation)
        return cast(RoundingPlatform, self._platform).rounded_gate(
            product, self._activation, rounds_to
        )
