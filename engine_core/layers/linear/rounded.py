"""Weights of eight bits that are multiplied with tokens of eight bits, made when a model is loaded
onto a Hopper GPU; a model's file has none."""

from __future__ import annotations

import torch

from headwater.kernels.gemm.w8a8 import W8A8Weight, signed_in_place, w8a8_twin
from headwater.kernels.quant.byte_weights import ByteWeight

from .linear import Linear


class RoundedLinear(Linear):
    """Linear layer that multiplies activations rounded to the 8 bits of its weights. A token has
    one scale, or one for every 128 inputs where the weight is in blocks."""

    kind = "rounded"

    def __init__(self, weight: ByteWeight) -> None:
        """Takes the memory of the weight's values."""
        self.out_features, self.in_features = weight.shape
        self.weight: W8A8Weight = signed_in_place(weight)
        self.rounds_to = self.weight.rounding

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return w8a8_twin(x, self.weight)
