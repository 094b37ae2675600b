"""Two products with a gate between them. Source: Shazeer, "GLU variants improve transformer", 2020."""

from __future__ import annotations

import torch

from .linear import Linear
from .platform import Platform


class Mlp:
    """down(activation(gates) * ups). One launch makes gates, ups and their product where the platform has such a kernel
    for the kind of `gate_up`."""

    def __init__(self, platform: Platform, gate_up: Linear, down: Linear, activation: str) -> None:
        """gate_up [2 I, H], gates first; down [H, I]; activation as in `Platform.gate`."""
        self.gate_up, self.down = gate_up, down
        self._platform, self._activation = platform, activation
        self._fused = platform.gated_linear(gate_up, activation)
        self._product, self._down = platform.linear(gate_up), platform.linear(down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        if self._fused is not None:
            return self._down(self._fused(x))
        return self._down(self._platform.gate(self._product(x), self._activation))
