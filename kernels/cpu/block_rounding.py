"""Rounds blocks of activations to 8 bits on a CPU: what kernels call for the rows that they
multiply. Twin: `kernels.quant.block_activations`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from ..quant.block_activations import (
    HALF_SUM_AT,
    LEAST_MAGNITUDE,
    LEAST_SQUARES,
    MOST,
    NUM_PARTS,
    REST_STEPS,
    ROW_BYTES,
    SCALE_AT,
    SCALED_SUM_AT,
    SUM_AT,
)
from ..quant.block_formats import BLOCK
from .compiler.scalars import put, put_int32, size_of
from .compiler.simd import add, highest_of, load, maximum, minimum, mul, nearest, splat, sub, sum_of
from .compiler.simd_types import F32, F32_ELEMENT, I64, LANES, NUM_LANES

_INTS = ir.VectorType(ir.IntType(32), NUM_LANES)
_BYTES = ir.VectorType(ir.IntType(8), NUM_LANES)
_MOST = F32(MOST)
_LEAST = F32(LEAST_MAGNITUDE)
_LEAST_SQUARES = F32(LEAST_SQUARES)
_REST_STEPS = F32(REST_STEPS)


@intrinsic
def _store_bytes(typing: Any, address: Any, x: Any) -> Any:
    """Stores whole numbers -128…127 as bytes; returns their sum."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        numbers = builder.fptosi(a[1], _INTS)
        builder.store(
            builder.trunc(numbers, _BYTES), builder.inttoptr(a[0], _BYTES.as_pointer()), align=1
        )
        function = ir.FunctionType(ir.IntType(32), [_INTS])
        total = builder.call(
            builder.module.declare_intrinsic(
                f"llvm.vector.reduce.add.v{NUM_LANES}i32", (), function
            ),
            [numbers],
        )
        return builder.sext(total, ir.IntType(64))

    return I64(I64, LANES), generate


@njit
def _magnitude(p_x: int, element: Any) -> Any:
    """The largest of 32 numbers."""
    size = BLOCK * size_of(element)
    zero = splat(F32(0))
    first = load(p_x, element)
    second = load(p_x + size // 2, element)
    return highest_of(maximum(maximum(first, sub(zero, first)), maximum(second, sub(zero, second))))


@njit
def _scaled(p_x: int, inverse: Any, element: Any) -> Any:
    """Sixteen numbers by the inverse of their scale."""
    return minimum(maximum(mul(load(p_x, element), splat(inverse)), splat(-_MOST)), splat(_MOST))


@njit
def _put_block(p_block: int, first: Any, second: Any, scale: Any, flag: int) -> None:
    """Stores 32 whole numbers."""
    half = _store_bytes(p_block, first)
    total = half + _store_bytes(p_block + NUM_LANES, second)
    put(p_block + SCALE_AT, scale, F32_ELEMENT)
    put(p_block + SCALED_SUM_AT, scale * F32(total), F32_ELEMENT)
    put_int32(p_block + SUM_AT, total)
    put_int32(p_block + HALF_SUM_AT, 2 * half + flag)


@njit
def quantize_blocks(p_x: int, p_out: int, num_rows: int, num_blocks: int, element: Any) -> None:
    """Rounds rows of contiguous blocks with elements of one type; second parts (the rounded
    remainders) follow a row's blocks."""
    size = BLOCK * size_of(element)
    rest_bytes = num_blocks * ROW_BYTES
    for row in range(num_rows):
        for block in range(num_blocks):
            p_block = p_x + (row * num_blocks + block) * size
            p_rounded = p_out + (NUM_PARTS * row * num_blocks + block) * ROW_BYTES
            magnitude = _magnitude(p_block, element)
            inverse = _inverse(magnitude)
            scale = magnitude / _MOST
            first = _scaled(p_block, inverse, element)
            second = _scaled(p_block + size // 2, inverse, element)
            whole = nearest(first)
            other = nearest(second)
            has_rest = (
                magnitude >= _LEAST
                and sum_of(add(mul(whole, whole), mul(other, other))) < _LEAST_SQUARES
            )
            _put_block(p_rounded, whole, other, scale, 1 if has_rest else 0)
            if has_rest:
                steps = splat(_REST_STEPS)
                whole = nearest(mul(sub(first, whole), steps))
                other = nearest(mul(sub(second, other), steps))
                _put_block(p_rounded + rest_bytes, whole, other, scale / _REST_STEPS, 0)


@njit
def quantize_rows(p_x: int, p_out: int, num_rows: int, num_blocks: int, element: Any) -> None:
    """Rounds rows of contiguous blocks; the blocks of a row share one scale, without remainders."""
    size = BLOCK * size_of(element)
    for row in range(num_rows):
        p_row = p_x + row * num_blocks * size
        p_rounded = p_out + row * num_blocks * ROW_BYTES
        magnitude = F32(0)
        for block in range(num_blocks):
            magnitude = max(magnitude, _magnitude(p_row + block * size, element))
        inverse = _inverse(magnitude)
        scale = magnitude / _MOST
        for block in range(num_blocks):
            p_block = p_row + block * size
            first = _scaled(p_block, inverse, element)
            second = _scaled(p_block + size // 2, inverse, element)
            _put_block(p_rounded + block * ROW_BYTES, nearest(first), nearest(second), scale, 0)


@njit
def _inverse(magnitude: Any) -> Any:
    return F32(0) if magnitude < _LEAST else _MOST / magnitude
