"""Activations in 8 bits on a CPU. Twin: `kernels.block_activations`."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from ..block_activations import (
    HALF_SUM_AT,
    LEAST_MAGNITUDE,
    MOST,
    ROW_BYTES,
    SCALE_AT,
    SCALED_SUM_AT,
    SUM_AT,
)
from ..block_formats import BLOCK
from .compiled import Kernel, argument, items
from .scalars import put, put_int32, size_of
from .simd import highest_of, load, maximum, minimum, mul, nearest, splat, sub
from .simd_types import BF16_ELEMENT, F32, F32_ELEMENT, I64, LANES, NUM_LANES

_INTS, _BYTES = ir.VectorType(ir.IntType(32), NUM_LANES), ir.VectorType(ir.IntType(8), NUM_LANES)
_MOST, _LEAST = F32(MOST), F32(LEAST_MAGNITUDE)


def quantize(x: torch.Tensor) -> torch.Tensor:
    """Rounds x [T, K], contiguous, to uint8 [T, K / 32, 48]."""
    return _quantized(x, KERNEL)


def quantize_tokens(x: torch.Tensor) -> torch.Tensor:
    """As `quantize`, with one scale for all inputs of a row."""
    return _quantized(x, TOKEN_KERNEL)


def _quantized(x: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    assert x.is_contiguous()
    num_rows, num_blocks = x.shape[0], x.shape[1] // BLOCK
    rows = torch.empty(num_rows, num_blocks, ROW_BYTES, dtype=torch.uint8)
    kernel(x.dtype, num_rows, 2 * x.numel(), x.data_ptr(), rows.data_ptr(), num_blocks)
    return rows


@intrinsic
def _store_bytes(typing: Any, address: Any, x: Any) -> Any:
    """Stores whole numbers -128…127 as bytes; returns their sum."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        numbers = builder.fptosi(a[1], _INTS)
        builder.store(builder.trunc(numbers, _BYTES), builder.inttoptr(a[0], _BYTES.as_pointer()), align=1)
        function = ir.FunctionType(ir.IntType(32), [_INTS])
        total = builder.call(
            builder.module.declare_intrinsic(f"llvm.vector.reduce.add.v{NUM_LANES}i32", (), function), [numbers]
        )
        return builder.sext(total, ir.IntType(64))

    return I64(I64, LANES), generate


@njit
def _magnitude(p_x: int, element: Any) -> Any:
    """The largest of 32 numbers."""
    size = BLOCK * size_of(element)
    zero, first, second = splat(F32(0)), load(p_x, element), load(p_x + size // 2, element)
    return highest_of(maximum(maximum(first, sub(zero, first)), maximum(second, sub(zero, second))))


@njit
def _put_block(p_x: int, p_block: int, magnitude: Any, element: Any) -> None:
    """Stores a block of 32 numbers, none of which is larger than `magnitude`."""
    low, high = splat(-_MOST), splat(_MOST)
    inverse = splat(F32(0) if magnitude < _LEAST else _MOST / magnitude)
    first, second = load(p_x, element), load(p_x + BLOCK * size_of(element) // 2, element)
    half = _store_bytes(p_block, nearest(minimum(maximum(mul(first, inverse), low), high)))
    rest = _store_bytes(p_block + NUM_LANES, nearest(minimum(maximum(mul(second, inverse), low), high)))
    scale = magnitude / _MOST
    put(p_block + SCALE_AT, scale, F32_ELEMENT)
    put(p_block + SCALED_SUM_AT, scale * F32(half + rest), F32_ELEMENT)
    put_int32(p_block + SUM_AT, half + rest)
    put_int32(p_block + HALF_SUM_AT, half)


@njit
def quantize_blocks(p_x: int, p_out: int, num_blocks: int, element: Any) -> None:
    """Rounds blocks that follow one another, of elements of one type."""
    size = BLOCK * size_of(element)
    for block in range(num_blocks):
        p_block = p_x + block * size
        _put_block(p_block, p_out + block * ROW_BYTES, _magnitude(p_block, element), element)


@njit
def quantize_rows(p_x: int, p_out: int, num_rows: int, num_blocks: int, element: Any) -> None:
    """Rounds rows of blocks that follow one another; the blocks of a row have one scale."""
    size = BLOCK * size_of(element)
    for row in range(num_rows):
        p_row, p_rounded = p_x + row * num_blocks * size, p_out + row * num_blocks * ROW_BYTES
        magnitude = F32(0)
        for block in range(num_blocks):
            magnitude = max(magnitude, _magnitude(p_row + block * size, element))
        for block in range(num_blocks):
            _put_block(p_row + block * size, p_rounded + block * ROW_BYTES, magnitude, element)


def _rows(rounds_tokens: bool, element: Any) -> Any:
    def work(arguments: int) -> None:
        num_blocks = argument(arguments, 2)
        row_size = num_blocks * BLOCK * size_of(element)
        for row in items(arguments):
            p_x, p_out = argument(arguments, 0) + row * row_size, argument(arguments, 1) + row * num_blocks * ROW_BYTES
            if rounds_tokens:
                quantize_rows(p_x, p_out, 1, num_blocks, element)
            else:
                quantize_blocks(p_x, p_out, num_blocks, element)

    return work


KERNEL = Kernel(_rows(False, F32_ELEMENT), _rows(False, BF16_ELEMENT))
TOKEN_KERNEL = Kernel(_rows(True, F32_ELEMENT), _rows(True, BF16_ELEMENT))
