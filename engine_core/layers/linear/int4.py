"""Weights of four bits in groups, each with a scale and a zero point, packed from the file to the
kernel."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headwater.kernels.quant.int4_layout import BLOCK, WORD, Int4Weight, cut_inputs

from ...config import ConfigError
from ...weights.grouped import GROUPS, INT4, SCALE_DTYPES, SCALES, ZEROS
from .grouped import GroupedLinear


class Int4Linear(GroupedLinear):
    """A weight is (q - zero) * scale, rounded to the model's dtype."""

    kind = numbers = "int4"
    suffixes = (INT4, SCALES)
    optional_suffixes = (ZEROS, GROUPS)
    values_dtype = torch.int32
    values_a_word = WORD
    scale_dtypes = SCALE_DTYPES
    unit = BLOCK
    weight: Int4Weight

    @classmethod
    def cut_inputs(
        cls,
        tensors: Mapping[str, torch.Tensor],
        axes: Mapping[str, int | None],
        inputs: range,
        num_inputs: int,
    ) -> dict[str, torch.Tensor]:
        if inputs.start % BLOCK or inputs.stop % BLOCK:
            raise ConfigError("inputs of a rank", len(inputs), f"multiples of {BLOCK}")
        others = {suffix: axis for suffix, axis in axes.items() if suffix != INT4}
        found = super().cut_inputs(tensors, others, inputs, num_inputs)
        return found | {INT4: cut_inputs(tensors[INT4], inputs)}
