"""Weights in floating-point numbers of eight bits, in groups that share a scale."""

from __future__ import annotations

import torch

from headwater.kernels.quant.byte_weights import Fp8Weight

from ...weights.grouped import FP8, FP8_TOKENS, SCALES
from .grouped import GroupedLinear


class Fp8Linear(GroupedLinear):
    """A weight is a number times its scale, rounded to the model's dtype."""

    kind = numbers = "fp8"
    suffixes = (FP8, SCALES)
    values_dtype = torch.float8_e4m3fn
    scale_dtypes = (torch.float32,)
    weight: Fp8Weight


class Fp8TokensLinear(Fp8Linear):
    """The weights are made for activations in 8 bits, each token with a scale of its own. A
    platform without such a product multiplies activations as they are; ranks that divide the inputs
    round their own."""

    kind = "f8a8"
    suffixes = (FP8_TOKENS, SCALES)
