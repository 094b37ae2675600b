"""Layers as compressed-tensors stores integers of eight bits (`int-quantized`, `naive-quantized`):
weights alone, or for activations that are rounded too (Xiao et al., SmoothQuant, 2022, whose
factors are in weights and norms by then).

weight int8 [N, K]. weight_scale [N, groups], [N] or one. weight_zero_point, where weights are not
symmetric, int8 of the scales' shape.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headwater.kernels.quant.byte_weights import Int8Weight

from ...config import require
from ..grouped import WIDE_SCALE_DTYPES, check_scales, check_tensor, num_groups
from .packing import Packing

DROPPED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
"""Scales of activations: each token's own is used."""
WEIGHT = "weight"
SCALE = "weight_scale"
ZEROS = "weight_zero_point"
MIDDLE = 128
"""Added to weights and zero points, which are stored without sign."""


def suffixes(packing: Packing) -> tuple[str, ...]:
    return (WEIGHT, SCALE, *((ZEROS,) if packing.has_zeros else ()))


def drops(name: str, suffix: str, tensor: torch.Tensor, packing: Packing) -> bool:
    return suffix in DROPPED


def unpack(name: str, tensors: Mapping[str, torch.Tensor], packing: Packing) -> Int8Weight:
    """Raises `ConfigError` naming the tensor that does not fit."""
    weight = tensors[WEIGHT]
    require(
        weight.ndim == 2,
        f"checkpoint tensor {name}.{WEIGHT}",
        tuple(weight.shape),
        "[outputs, inputs]",
    )
    check_tensor(f"{name}.{WEIGHT}", weight, tuple(weight.shape), torch.int8)
    n, k = weight.shape
    groups = num_groups(name, k, packing.group_size)
    shape = n, groups
    scales = _of_groups(f"{name}.{SCALE}", tensors[SCALE], shape, packing, *WIDE_SCALE_DTYPES)
    check_scales(f"{name}.{SCALE}", scales)
    zeros = torch.full((groups, n), MIDDLE, dtype=torch.uint8)
    if packing.has_zeros:
        zeros = _without_sign(
            _of_groups(f"{name}.{ZEROS}", tensors[ZEROS], shape, packing, torch.int8)
        )
    return Int8Weight(
        values=_without_sign(weight),
        scales=scales,
        zeros=zeros,
        rounds_tokens=packing.rounds_whole_tokens,
    )


def _of_groups(
    name: str, tensor: torch.Tensor, shape: tuple[int, int], packing: Packing, *dtypes: torch.dtype
) -> torch.Tensor:
    """[N, groups], as one number or [N], → [groups, N]"""
    n, groups = shape
    if packing.has_one_scale and tensor.numel() == groups == 1:
        tensor = tensor.reshape(1, 1).expand(n, 1)
    elif tensor.shape == (n,):
        tensor = tensor[:, None]
    check_tensor(name, tensor, shape, *dtypes)
    return tensor.t().contiguous()


def _without_sign(values: torch.Tensor) -> torch.Tensor:
    """int8 → uint8, `MIDDLE` more"""
    return values.contiguous().view(torch.uint8) ^ MIDDLE
