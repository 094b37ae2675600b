"""Tiles of e4m3 weights, as LLVM code: their products with rows of activations in float32. The
order of bytes is `kernels.quant.fp8_tiles`'s."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..quant.block_formats import BLOCK, TILE_ROWS
from ..quant.fp8_tiles import Fp8Format
from .compiler.simd_types import F32
from .tile_code import FLOAT, FLOATS, INTS, LONG, NARROW, TileCode

GROUP_BITS = 32
"""Number of lower bits of `units` of such a tile; they count groups, and the bits above them the
blocks of each."""


def units_of(num_groups: int, blocks_of_group: int) -> int:
    return num_groups | blocks_of_group << GROUP_BITS


def add_tile(
    code: TileCode,
    totals: list[Any],
    format: Fp8Format,
    tile: Any,
    units: Any,
    rows: Any,
    row_bytes: Any,
    element: Any,
) -> None:
    """Adds the product of a tile to the sixteen outputs of each row, which `totals` points to.
    `rows` is the address of the first row's activations; weights are rounded to `element`."""
    b = code.builder
    num_groups = b.and_(units, ir.Constant(LONG, (1 << GROUP_BITS) - 1))
    blocks = b.lshr(units, ir.Constant(LONG, GROUP_BITS))
    group_bytes = b.add(
        b.mul(blocks, ir.Constant(LONG, BLOCK * TILE_ROWS)), ir.Constant(LONG, format.scale_bytes)
    )
    parts = [cgutils.alloca_once(b, FLOATS) for _ in totals]
    with cgutils.for_range(b, num_groups, intp=LONG) as group:
        at = b.add(tile, b.mul(group.index, group_bytes))
        scale = (
            code.broadcast(code.load(at, 0, FLOAT), FLOATS)
            if format.is_shared
            else code.load(at, 0, FLOATS)
        )
        numbers = b.add(at, ir.Constant(LONG, format.scale_bytes))
        first = b.mul(group.index, blocks)
        with cgutils.for_range(b, blocks, intp=LONG) as inner:
            own = b.add(numbers, b.mul(inner.index, ir.Constant(LONG, BLOCK * TILE_ROWS)))
            inputs = b.add(rows, b.mul(b.add(first, inner.index), ir.Constant(LONG, BLOCK * 4)))
            for part in parts:
                b.store(code.constant(0.0, FLOATS), part)
            with cgutils.for_range(b, ir.Constant(LONG, BLOCK), intp=LONG) as step:
                weight = _weights(
                    code,
                    b.add(own, b.mul(step.index, ir.Constant(LONG, TILE_ROWS))),
                    scale,
                    element,
                )
                address = b.add(inputs, b.mul(step.index, ir.Constant(LONG, 4)))
                for part in parts:
                    x = code.broadcast(code.load(address, 0, FLOAT), FLOATS)
                    b.store(_fma(code, x, weight, b.load(part)), part)
                    address = b.add(address, row_bytes)
            for total, part in zip(totals, parts, strict=True):
                b.store(b.fadd(b.load(total), b.load(part)), total)


def _weights(code: TileCode, address: Any, scale: Any, element: Any) -> Any:
    """Sixteen weights as they are expanded to the element's type, in float32."""
    b = code.builder
    # The sign goes to the highest bit, exponent and fraction to float32's lowest exponent and
    # highest fraction bits.
    bits = b.shl(b.sext(code.load(address, 0, NARROW), INTS), code.constant(20))
    bits = b.and_(bits, code.constant(0x87F00000))
    # 2 ** 120 takes the exponent from e4m3's to float32's, of numbers below the normal ones too.
    number = b.fmul(b.bitcast(bits, FLOATS), b.bitcast(code.constant((127 + 120) << 23), FLOATS))
    weight = b.fmul(number, scale)
    return weight if element == F32 else _brain(code, weight)


def _brain(code: TileCode, x: Any) -> Any:
    """Float32 numbers rounded to bfloat16, to nearest, ties to even."""
    b = code.builder
    bits = b.bitcast(x, INTS)
    odd = b.and_(b.lshr(bits, code.constant(16)), code.constant(1))
    bits = b.add(bits, b.add(odd, code.constant(0x7FFF)))
    return b.bitcast(b.and_(bits, code.constant(0xFFFF0000)), FLOATS)


def _fma(code: TileCode, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once."""
    kinds = [FLOATS, FLOATS, FLOATS]
    function = code.builder.module.declare_intrinsic(
        f"llvm.fma.v{TILE_ROWS}f32", (), ir.FunctionType(FLOATS, kinds)
    )
    return code.builder.call(function, [x, y, z])
