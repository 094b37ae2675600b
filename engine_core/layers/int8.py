"""Weights of eight bits, integers in groups that share a scale and a zero point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch

from headwater.kernels.byte_weights import Int8Weight, expand

from ..config import ConfigError
from ..weights.byte_weights import INT8, W8A8
from ..weights.grouped import GROUPS, SCALES, WIDE_SCALE_DTYPES, ZEROS
from .grouped import GroupedLinear
from .linear import Parameter


class Int8Linear(GroupedLinear):
    """A weight is (q - zero) * scale, rounded to the model's dtype."""

    kind = "int8"
    values: ClassVar = INT8
    """Name of the integers."""
    rounds_tokens: ClassVar = False
    suffixes = (INT8, SCALES, ZEROS)
    optional_suffixes = (GROUPS,)

    def __init__(self, weight: Int8Weight, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype
        self.out_features, self.in_features = weight.shape

    @classmethod
    def parameters(
        cls, out_features: int, in_features: int, dtype: torch.dtype, stored: Mapping[str, torch.Tensor]
    ) -> tuple[Parameter, ...]:
        """Number of groups, dtype of scales and whether inputs name their groups are as stored."""
        scales = stored[SCALES]
        num_groups = len(scales)
        scale_dtype = scales.dtype if scales.dtype in WIDE_SCALE_DTYPES else WIDE_SCALE_DTYPES[0]
        if not num_groups or in_features % num_groups:
            raise ConfigError("groups of int8 weights", f"{num_groups} of {in_features} inputs", "equal ones")
        whole, of_groups = (out_features, in_features), (num_groups, out_features)
        parts = (
            Parameter(suffix=cls.values, shape=whole, dtype=torch.uint8, out_axis=0, in_axis=1),
            Parameter(suffix=SCALES, shape=of_groups, dtype=scale_dtype, out_axis=1, in_axis=0),
            Parameter(suffix=ZEROS, shape=of_groups, dtype=torch.uint8, out_axis=1, in_axis=0),
        )
        if GROUPS not in stored:
            return parts
        return (*parts, Parameter(suffix=GROUPS, shape=(in_features,), dtype=torch.int32, out_axis=None, in_axis=0))

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        weight = Int8Weight(
            values=tensors[cls.values],
            scales=tensors[SCALES],
            zeros=tensors[ZEROS],
            groups=tensors.get(GROUPS),
            rounds_tokens=cls.rounds_tokens,
        )
        return cls(weight, dtype)

    def expanded(self) -> torch.Tensor:
        return expand(self.weight, self.dtype)


class W8A8Linear(Int8Linear):
    """Linear layer of a checkpoint that was made for activations in 8 bits, each token with a scale of its own. A
    platform without such a product multiplies activations as they are."""

    kind = "w8a8"
    values: ClassVar = W8A8
    rounds_tokens: ClassVar = True
    suffixes = (W8A8, SCALES, ZEROS)

    @classmethod
    def cut_inputs(
        cls, tensors: Mapping[str, torch.Tensor], axes: Mapping[str, int | None], inputs: range, num_inputs: int
    ) -> dict[str, torch.Tensor]:
        """Refused: a token's scale is that of all its inputs, and a rank has a part of them."""
        allowed = "1 with weights whose tokens are rounded to 8 bits"
        raise ConfigError("tensor_parallel_size", num_inputs // len(inputs), allowed)
