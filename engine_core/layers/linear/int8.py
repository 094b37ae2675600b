"""Weights of eight bits, integers in groups that share a scale and a zero point."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headwater.kernels.quant.byte_weights import Int8Weight

from ...config import ConfigError
from ...weights.grouped import GROUPS, INT8, SCALES, W8A8, WIDE_SCALE_DTYPES, ZEROS
from .grouped import GroupedLinear


class Int8Linear(GroupedLinear):
    """A weight is (q - zero) * scale, rounded to the model's dtype."""

    kind = numbers = "int8"
    suffixes = (INT8, SCALES, ZEROS)
    optional_suffixes = (GROUPS,)
    values_dtype = torch.uint8
    scale_dtypes = WIDE_SCALE_DTYPES
    weight: Int8Weight


class W8A8Linear(Int8Linear):
    """Linear layer of a checkpoint that was made for activations in 8 bits, each token with a scale
    of its own. A platform without such a product multiplies activations as they are."""

    kind = "w8a8"
    suffixes = (W8A8, SCALES, ZEROS)

    @classmethod
    def cut_inputs(
        cls,
        tensors: Mapping[str, torch.Tensor],
        axes: Mapping[str, int | None],
        inputs: range,
        num_inputs: int,
    ) -> dict[str, torch.Tensor]:
        """Raises `ConfigError`: a token's scale depends on all of its inputs, and a rank has only
        some of them."""
        allowed = "1 with weights whose tokens are rounded to 8 bits"
        raise ConfigError("tensor_parallel_size", num_inputs // len(inputs), allowed)
