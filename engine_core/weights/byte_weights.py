"""Linear layers of eight bits, and of MXFP4, in a model's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from headwater.kernels.quant.byte_weights import ByteWeight
from headwater.kernels.quant.int4_layout import Int4Weight
from headwater.kernels.quant.mxfp4 import BLOCK, Mxfp4Weight, num_words

from ..config import require
from .blocks import Parts
from .grouped import (
    FP8,
    FP8_TOKENS,
    GROUPS,
    INT8,
    MXFP4,
    SCALES,
    W8A8,
    WIDE_SCALE_DTYPES,
    ZEROS,
    check_tensor,
    expanded,
    named,
    weight_of,
)

EXPANDED = (INT8, W8A8, FP8, FP8_TOKENS, MXFP4)
"""Names of values that most platforms have no product for."""
Kept = ByteWeight | Mxfp4Weight | Parts
Keeps = Callable[[str, Kept], bool]
"""Whether a platform has a product for the weight of this name, which then stays packed."""


def keeps_none(name: str, weight: Kept) -> bool:
    """The answer of platforms that have none."""
    return False


def expand_all(
    tensors: dict[str, torch.Tensor], dtype: torch.dtype, keeps: Keeps = keeps_none
) -> None:
    """Expands every weight of eight bits or of MXFP4 in a model's file to the dtype, one after
    another, but those that `keeps` accepts. Raises `ConfigError` naming a weight that cannot be
    expanded."""
    for name in [name for name in tensors if name.endswith(EXPANDED)]:
        layer, _, values = name.rpartition(".")
        own = {
            suffix: tensors.pop(layer + suffix, None)
            for suffix in (f".{values}", SCALES, ZEROS, GROUPS)
        }
        found = {suffix: tensor for suffix, tensor in own.items() if tensor is not None}
        _check(layer, f".{values}", found)
        weight = weight_of(found)
        assert not isinstance(weight, Int4Weight)
        if keeps(layer, weight):
            tensors |= named(weight, layer)
        else:
            tensors[layer] = expanded(weight, dtype)


def _check(layer: str, values: str, tensors: Mapping[str, torch.Tensor]) -> None:
    is_float = values in (FP8, FP8_TOKENS, MXFP4)
    for suffix in (SCALES,) if is_float else (SCALES, ZEROS):
        require(
            suffix in tensors,
            "checkpoint",
            f"without {layer}{suffix}",
            "every tensor of the architecture",
        )
    groups = len(tensors[SCALES])
    if values == MXFP4:
        words = tensors[values]
        check_tensor(layer + values, words, (len(words), num_words(BLOCK * groups)), torch.int32)
        check_tensor(layer + SCALES, tensors[SCALES], (groups, len(words)), torch.uint8)
        return
    n, k = tensors[values].shape
    require(
        groups > 0 and k % groups == 0,
        f"groups of {layer}",
        f"{groups} of {k} inputs",
        "equal ones",
    )
    dtypes = (torch.float32,) if is_float else WIDE_SCALE_DTYPES
    check_tensor(layer + SCALES, tensors[SCALES], (groups, n), *dtypes)
    if not is_float:
        check_tensor(layer + ZEROS, tensors[ZEROS], (groups, n), torch.uint8)
