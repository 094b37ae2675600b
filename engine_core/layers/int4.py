"""Weights of four bits in groups, each with a scale and a zero point, packed from the file to the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from headwater.kernels.int4_layout import BLOCK, WORD, Int4Weight, cut_inputs, expand

from ..config import ConfigError
from ..weights.grouped import GROUPS, SCALE_DTYPES, SCALES, ZEROS
from ..weights.int4 import WORDS
from .grouped import GroupedLinear
from .linear import Parameter


class Int4Linear(GroupedLinear):
    """A weight is (q - zero) * scale, rounded to the model's dtype."""

    kind = "int4"
    suffixes = (WORDS, SCALES)
    optional_suffixes = (ZEROS, GROUPS)

    def __init__(self, weight: Int4Weight, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype
        self.out_features, self.in_features = weight.shape

    @classmethod
    def parameters(
        cls, out_features: int, in_features: int, dtype: torch.dtype, stored: Mapping[str, torch.Tensor]
    ) -> tuple[Parameter, ...]:
        """Number of groups, dtype of scales, and whether there are zero points and inputs name their groups are as
        stored."""
        scales = stored[SCALES]
        num_groups, scale_dtype = len(scales), scales.dtype if scales.dtype in SCALE_DTYPES else SCALE_DTYPES[0]
        if in_features % BLOCK or not num_groups or in_features % num_groups:
            raise ConfigError("groups of int4 weights", f"{num_groups} of {in_features} inputs", "equal ones, by 32")
        words = Parameter(
            suffix=WORDS, shape=(out_features, in_features // WORD), dtype=torch.int32, out_axis=0, in_axis=1
        )
        of_groups = (num_groups, out_features)
        parts = [words, Parameter(suffix=SCALES, shape=of_groups, dtype=scale_dtype, out_axis=1, in_axis=0)]
        if ZEROS in stored:
            parts.append(Parameter(suffix=ZEROS, shape=of_groups, dtype=torch.uint8, out_axis=1, in_axis=0))
        if GROUPS in stored:
            order = Parameter(suffix=GROUPS, shape=(in_features,), dtype=torch.int32, out_axis=None, in_axis=0)
            parts.append(order)
        return tuple(parts)

    @classmethod
    def cut_inputs(
        cls, tensors: Mapping[str, torch.Tensor], axes: Mapping[str, int | None], inputs: range, num_inputs: int
    ) -> dict[str, torch.Tensor]:
        if inputs.start % BLOCK or inputs.stop % BLOCK:
            raise ConfigError("inputs of a rank", len(inputs), f"multiples of {BLOCK}")
        others = {suffix: axis for suffix, axis in axes.items() if suffix != WORDS}
        found = super().cut_inputs(tensors, others, inputs, num_inputs)
        return found | {WORDS: cut_inputs(tensors[WORDS], inputs)}

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        weight = Int4Weight(
            words=tensors[WORDS], scales=tensors[SCALES], zeros=tensors.get(ZEROS), groups=tensors.get(GROUPS)
        )
        return cls(weight, dtype)

    def expanded(self) -> torch.Tensor:
        return expand(self.weight, self.dtype)
