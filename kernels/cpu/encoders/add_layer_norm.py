"""LayerNorm of a sum over the last dimension, on a CPU. Twin: `kernels.norm.add_layer_norm`."""

from __future__ import annotations

import math
from typing import Any

import torch
from numba import njit

from ..compiler.compiled import Kernel, address_of, argument, float_bits, items
from ..compiler.scalars import float32_at, size_of
from ..compiler.simd import add, fma, load, mul, splat, store, sub, sum_of
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> None:
    """LayerNorm of x [T, H] + residual [T, H] by weight and bias [H], all contiguous and of one
    dtype, written over residual; H divides by 16. Sums stay in float32; the result alone is
    rounded."""
    num_rows, hidden = x.shape
    assert x.is_contiguous()
    assert residual.is_contiguous()
    assert hidden % NUM_LANES == 0
    assert x.dtype == residual.dtype == weight.dtype == bias.dtype
    addresses = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), bias.data_ptr())
    KERNEL(x.dtype, num_rows, x.numel(), *addresses, hidden, float_bits(eps))


@njit
def _norm_row(arguments: int, i: int, element: Any) -> None:
    hidden = argument(arguments, 4)
    end = hidden * size_of(element)
    step = NUM_LANES * size_of(element)
    p_x = argument(arguments, 0) + i * end
    p_residual = argument(arguments, 1) + i * end
    p_weight = argument(arguments, 2)
    p_bias = argument(arguments, 3)
    total = splat(F32(0))
    for at in range(0, end, step):
        total = add(total, add(load(p_residual + at, element), load(p_x + at, element)))
    mean = splat(sum_of(total) / F32(hidden))
    # Squares of differences from the mean, not of the sums: those would cancel.
    squares = splat(F32(0))
    for at in range(0, end, step):
        x = add(load(p_residual + at, element), load(p_x + at, element))
        x = sub(x, mean)
        squares = fma(x, x, squares)
    eps = float32_at(address_of(arguments, 5))
    scale = splat(F32(1) / math.sqrt(sum_of(squares) / F32(hidden) + eps))
    for at in range(0, end, step):
        x = add(load(p_residual + at, element), load(p_x + at, element))
        x = mul(sub(x, mean), scale)
        x = fma(x, load(p_weight + at, element), load(p_bias + at, element))
        store(p_residual + at, x, element)


def _rows(element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            _norm_row(arguments, i, element)

    return work


KERNEL = Kernel(_rows(F32_ELEMENT), _rows(BF16_ELEMENT))
