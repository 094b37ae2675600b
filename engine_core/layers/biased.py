"""Linear layers with more than a product: a bias, or what a head does to its logits."""

from __future__ import annotations

import torch

from .linear.linear import Linear
from .platform import Platform


class BiasedLinear(Linear):
    """A product and a bias, which ranks that divide the inputs add once, to the sum of theirs."""

    kind = "biased"

    def __init__(self, platform: Platform, linear: Linear, bias: torch.Tensor) -> None:
        """bias [N]"""
        self.out_features = linear.out_features
        self.in_features = linear.in_features
        self.rounds_to = linear.rounds_to
        self.bias = bias
        self.linear = linear
        self.unbiased = platform.linear(linear)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] → [T, N]"""
        return self.unbiased(x) + self.bias


class LogitLinear(Linear):
    """The head of a vocabulary whose logits are scaled, or capped: cap * tanh(logit / cap)."""

    kind = "logits"

    def __init__(self, platform: Platform, linear: Linear, scale: float, softcap: float) -> None:
        """`softcap` 0: logits are not capped."""
        self.out_features = linear.out_features
        self.in_features = linear.in_features
        self._platform = platform
        self._scale = scale
        self._softcap = softcap
        self._product = platform.linear(linear)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, K] → [S, V]"""
        logits = self._product(x)
        if self._scale != 1:
            logits = logits * self._scale
        if not self._softcap:
            return logits
        return self._platform.activation(logits / self._softcap, "tanh") * self._softcap
