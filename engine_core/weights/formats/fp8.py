"""Layers of floating-point numbers in eight bits (e4m3), as DeepSeek, FBGEMM and compressed-tensors
(`float-quantized`) store them.

weight float8_e4m3fn [N, K]. weight_scale or weight_scale_inv, by which it is multiplied: one, [N]
or [N, groups], or of blocks [ceil(N / outputs), ceil(K / inputs)].
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from headwater.kernels.quant.byte_weights import Fp8Weight

from ...config import require
from ..grouped import WIDE_SCALE_DTYPES, check_scales, check_tensor, num_groups
from .packing import TOKEN_GROUP, Packing

DROPPED = ("input_scale", "input_scale_ub", "activation_scale", "output_scale")
"""Scales of activations: where those are rounded, each token's own is used."""
WEIGHT = "weight"
POWERS_OF_TWO = torch.float8_e8m0fnu
"""A type of scales beside the usual ones."""


def suffixes(packing: Packing) -> tuple[str, ...]:
    return (WEIGHT, packing.scale)


def drops(name: str, suffix: str, tensor: torch.Tensor, packing: Packing) -> bool:
    return suffix in DROPPED


def unpack(name: str, tensors: Mapping[str, torch.Tensor], packing: Packing) -> Fp8Weight:
    """Raises `ConfigError` naming the tensor that does not fit."""
    weight = tensors[WEIGHT]
    scale = tensors[packing.scale]
    require(
        weight.ndim == 2,
        f"checkpoint tensor {name}.{WEIGHT}",
        tuple(weight.shape),
        "[outputs, inputs]",
    )
    check_tensor(f"{name}.{WEIGHT}", weight, tuple(weight.shape), torch.float8_e4m3fn)
    scales = _of_groups(f"{name}.{packing.scale}", scale, weight.shape[0], weight.shape[1], packing)
    rounds_tokens = rounds_inputs(packing, weight.shape[1], len(scales))
    return Fp8Weight(values=weight.contiguous(), scales=scales, rounds_tokens=rounds_tokens)


def rounds_inputs(packing: Packing, num_inputs: int, num_groups: int) -> bool:
    """Whether a layer is made for rounded activations: with one scale a token, or with one for
    every 128 inputs where its weights are in such blocks."""
    if packing.rounds_groups:
        return num_groups == -(-num_inputs // TOKEN_GROUP)
    return packing.activations == "fp8" and packing.block is None and num_groups == 1


def _of_groups(name: str, scale: torch.Tensor, n: int, k: int, packing: Packing) -> torch.Tensor:
    """float32 [groups, N]"""
    shape = (n, 1)
    if packing.block is not None:
        shape = -(-n // packing.block[0]), -(-k // packing.block[1])
    elif packing.group_size != -1:
        shape = n, num_groups(name, k, packing.group_size)
    elif scale.numel() == 1 and packing.has_one_scale:
        scale = scale.reshape(1, 1).expand(n, 1)
    elif scale.shape == (n,):
        scale = scale[:, None]
    check_tensor(name, scale, shape, *WIDE_SCALE_DTYPES, POWERS_OF_TWO)
    check_scales(name, scale)
    if packing.block is None:
        return scale.float().t().contiguous()
    outputs, inputs = packing.block
    # Size of equal groups: where the last block is cut off, the greatest common divisor of the
    # block's size and K.
    size = inputs if k % inputs == 0 else math.gcd(inputs, k)
    of_inputs = torch.arange(k // size) * size // inputs
    return scale.float()[torch.arange(n) // outputs][:, of_inputs].t().contiguous()
