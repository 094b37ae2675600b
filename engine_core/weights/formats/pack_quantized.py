"""Layers as compressed-tensors packs integers into words (`pack-quantized`), in 4 or 8 bits.

weight_packed int32 [N, ceil(K / c)], c numbers a word: word r of a row holds inputs c r … c r + c -
1, the first in the lowest bits; half of the range is added to each. weight_scale [N, groups].
weight_shape integers [2]: N and K. weight_zero_point, where weights are not symmetric, int32
[ceil(N / c), groups]: likewise along the outputs. weight_g_idx, where inputs are ordered by
activations, int32 [K]: the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headwater.kernels.quant.byte_weights import Int8Weight
from headwater.kernels.quant.int4_layout import Int4Weight, pack

from ...config import require
from ..grouped import (
    SCALE_DTYPES,
    WIDE_SCALE_DTYPES,
    check_scales,
    check_tensor,
    integers_of,
    num_groups,
    order_of,
)
from .packing import Packing

DROPPED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
PACKED = "weight_packed"
SCALE = "weight_scale"
SHAPE = "weight_shape"
ZEROS = "weight_zero_point"
ORDER = "weight_g_idx"


def suffixes(packing: Packing) -> tuple[str, ...]:
    zeros = (ZEROS,) if packing.has_zeros else ()
    return (PACKED, SCALE, SHAPE, *zeros, *((ORDER,) if packing.has_order else ()))


def drops(name: str, suffix: str, tensor: torch.Tensor, packing: Packing) -> bool:
    return suffix in DROPPED


def unpack(
    name: str, tensors: Mapping[str, torch.Tensor], packing: Packing
) -> Int4Weight | Int8Weight:
    """Raises `ConfigError` naming the tensor that does not fit."""
    words = tensors[PACKED]
    scale = tensors[SCALE]
    per_word = 32 // packing.bits
    n, k = _shape(name, tensors[SHAPE])
    groups = num_groups(name, k, packing.group_size)
    check_tensor(f"{name}.{PACKED}", words, (n, -(-k // per_word)), torch.int32)
    scales = _scales(name, scale, n, groups, packing)
    zeros = torch.full((groups, n), 1 << packing.bits - 1, dtype=torch.uint8)
    if packing.has_zeros:
        stored = tensors[ZEROS]
        check_tensor(f"{name}.{ZEROS}", stored, (-(-n // per_word), groups), torch.int32)
        zeros = integers_of(stored.t(), packing.bits).flatten(1)[:, :n].contiguous()
    order = order_of(f"{name}.{ORDER}", tensors[ORDER], k, groups) if packing.has_order else None
    values = integers_of(words, packing.bits).flatten(1)[:, :k]
    if packing.bits == 4:
        return Int4Weight(words=pack(values), scales=scales, zeros=zeros, groups=order)
    return Int8Weight(values=values, scales=scales, zeros=zeros, groups=order)


def _shape(name: str, shape: torch.Tensor) -> tuple[int, int]:
    check_tensor(f"{name}.{SHAPE}", shape, (2,), torch.int64, torch.int32)
    n, k = shape.tolist()
    require(n >= 1 and k >= 1, f"checkpoint tensor {name}.{SHAPE}", (n, k), "outputs and inputs")
    return n, k


def _scales(name: str, scale: torch.Tensor, n: int, groups: int, packing: Packing) -> torch.Tensor:
    """[groups, N]; one scale of a whole matrix is repeated."""
    dtypes = SCALE_DTYPES if packing.bits == 4 else WIDE_SCALE_DTYPES
    is_one = packing.has_one_scale and scale.numel() == groups == 1
    whole = scale.view(1, 1).expand(n, 1) if is_one else scale
    check_tensor(f"{name}.{SCALE}", whole, (n, groups), *dtypes)
    check_scales(f"{name}.{SCALE}", whole)
    return whole.t().contiguous()
