"""Language model head: hidden states to a logit for each token of the vocabulary."""

from __future__ import annotations

import torch

from .linear.linear import Linear
from .platform import Platform


class LMHead:
    def __init__(self, platform: Platform, linear: Linear) -> None:
        self.linear = linear
        self._product = platform.linear(linear)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → [S, V]"""
        return self._product(hidden)
