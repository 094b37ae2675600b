"""RMSNorm over the last dimension, with or without the residual add before it, on a CPU. Twin:
`kernels.norm.rms_norm`."""

from __future__ import annotations

import math
from typing import Any

import torch
from numba import njit

from .compiler.compiled import Kernel, address_of, argument, float_bits, items
from .compiler.scalars import float32_at, size_of
from .compiler.simd import add, fma, load, mul, splat, store, sum_of
from .compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x [T, H], contiguous, by weight [H] of x's dtype or float32; H divides by 16.
    Returns [T, H] in x's dtype."""
    return _run(x, 0, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds x to residual [T, H] in place, rounded to its dtype; returns the norm of the rounded
    sum."""
    assert residual.is_contiguous()
    return _run(x, residual.data_ptr(), weight, eps)


def _run(x: torch.Tensor, residual: int, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, hidden = x.shape
    assert x.is_contiguous()
    assert weight.dtype in (x.dtype, torch.float32)
    out = torch.empty_like(x)
    addresses = (x.data_ptr(), residual, weight.data_ptr(), out.data_ptr())
    kernel = KERNEL if weight.dtype == x.dtype else WIDE_KERNEL
    kernel(x.dtype, num_rows, x.numel(), *addresses, hidden, float_bits(eps))
    return out


@njit
def _norm_row(arguments: int, i: int, element: Any, weight_element: Any) -> None:
    hidden = argument(arguments, 4)
    row = i * argument(arguments, 4) * size_of(element)
    p_x = argument(arguments, 0) + row
    p_residual = argument(arguments, 1)
    p_weight = argument(arguments, 2)
    p_out = argument(arguments, 3) + row
    p_sum = p_x
    if p_residual:
        p_sum = p_residual + row
        for at in range(0, hidden * size_of(element), NUM_LANES * size_of(element)):
            store(p_sum + at, add(load(p_sum + at, element), load(p_x + at, element)), element)
    squares = splat(F32(0))
    for at in range(0, hidden * size_of(element), NUM_LANES * size_of(element)):
        x = load(p_sum + at, element)
        squares = fma(x, x, squares)
    eps = float32_at(address_of(arguments, 5))
    scale = splat(F32(1) / math.sqrt(sum_of(squares) / F32(hidden) + eps))
    for at in range(0, hidden, NUM_LANES):
        x = mul(load(p_sum + at * size_of(element), element), scale)
        weight = load(p_weight + at * size_of(weight_element), weight_element)
        store(p_out + at * size_of(element), mul(x, weight), element)


def _rows(element: Any, weight_element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            _norm_row(arguments, i, element, weight_element)

    return work


KERNEL = Kernel(_rows(F32_ELEMENT, F32_ELEMENT), _rows(BF16_ELEMENT, BF16_ELEMENT))
WIDE_KERNEL = Kernel(_rows(F32_ELEMENT, F32_ELEMENT), _rows(BF16_ELEMENT, F32_ELEMENT))
"""Kernel for weights in float32."""
