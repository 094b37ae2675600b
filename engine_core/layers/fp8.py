"""Weights in floating-point numbers of eight bits, in groups that share a scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch

from headwater.kernels.byte_weights import Fp8Weight, expand

from ..config import ConfigError
from ..weights.byte_weights import FP8, FP8_TOKENS
from ..weights.grouped import SCALES
from .grouped import GroupedLinear
from .linear import Parameter


class Fp8Linear(GroupedLinear):
    """A weight is a number times its scale, rounded to the model's dtype."""

    kind = "fp8"
    values: ClassVar = FP8
    """Name of the numbers."""
    rounds_tokens: ClassVar = False
    suffixes = (FP8, SCALES)

    def __init__(self, weight: Fp8Weight, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype
        self.out_features, self.in_features = weight.shape

    @classmethod
    def parameters(
        cls, out_features: int, in_features: int, dtype: torch.dtype, stored: Mapping[str, torch.Tensor]
    ) -> tuple[Parameter, ...]:
        """The number of groups is as stored."""
        num_groups = len(stored[SCALES])
        if not num_groups or in_features % num_groups:
            raise ConfigError("groups of fp8 weights", f"{num_groups} of {in_features} inputs", "equal ones")
        whole, of_groups = (out_features, in_features), (num_groups, out_features)
        return (
            Parameter(suffix=cls.values, shape=whole, dtype=torch.float8_e4m3fn, out_axis=0, in_axis=1),
            Parameter(suffix=SCALES, shape=of_groups, dtype=torch.float32, out_axis=1, in_axis=0),
        )

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        values, scales = tensors[cls.values], tensors[SCALES]
        return cls(Fp8Weight(values=values, scales=scales, rounds_tokens=cls.rounds_tokens), dtype)

    def expanded(self) -> torch.Tensor:
        return expand(self.weight, self.dtype)


class Fp8TokensLinear(Fp8Linear):
    """The weights are made for activations in 8 bits, each token with a scale of its own. A platform without such a
    product multiplies activations as they are; ranks that divide the inputs round their own."""

    kind = "f8a8"
    values: ClassVar = FP8_TOKENS
    rounds_tokens: ClassVar = True
    suffixes = (FP8_TOKENS, SCALES)
