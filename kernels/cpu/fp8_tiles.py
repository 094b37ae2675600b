"""Tiles of e4m3 weights and of MXFP4, as LLVM code: their products with rows of activations in
float32. The order of bytes is `kernels.quant.fp8_tiles`'s."""

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
    block_bytes = BLOCK * TILE_ROWS // (2 if format.is_float4 else 1)
    group_bytes = b.add(
        b.mul(blocks, ir.Constant(LONG, block_bytes)), ir.Constant(LONG, format.scale_bytes)
    )
    parts = [cgutils.alloca_once(b, FLOATS) for _ in totals]
    num_steps = BLOCK // 2 if format.is_float4 else BLOCK
    with cgutils.for_range(b, num_groups, intp=LONG) as group:
        at = b.add(tile, b.mul(group.index, group_bytes))
        scale = _scales(code, at, format)
        numbers = b.add(at, ir.Constant(LONG, format.scale_bytes))
        first = b.mul(group.index, blocks)
        with cgutils.for_range(b, blocks, intp=LONG) as inner:
            own = b.add(numbers, b.mul(inner.index, ir.Constant(LONG, num_steps * TILE_ROWS)))
            inputs = b.add(rows, b.mul(b.add(first, inner.index), ir.Constant(LONG, BLOCK * 4)))
            for part in parts:
                b.store(code.constant(0.0, FLOATS), part)
            with cgutils.for_range(b, ir.Constant(LONG, num_steps), intp=LONG) as step:
                where = b.add(own, b.mul(step.index, ir.Constant(LONG, TILE_ROWS)))
                weights = _weights_of_step(code, where, scale, format, element)
                address = b.add(inputs, b.mul(step.index, ir.Constant(LONG, 4 * len(weights))))
                for part in parts:
                    for i, weight in enumerate(weights):
                        x = code.broadcast(code.load(address, 4 * i, FLOAT), FLOATS)
                        b.store(_fma(code, x, weight, b.load(part)), part)
                    address = b.add(address, row_bytes)
            for total, part in zip(totals, parts, strict=True):
                b.store(b.fadd(b.load(total), b.load(part)), total)


def _scales(code: TileCode, address: Any, format: Fp8Format) -> Any:
    """Scales of sixteen rows, in float32."""
    b = code.builder
    if format.is_float4:
        powers = b.zext(code.load(address, 0, NARROW), INTS)
        # 2 ** -127 is below the normal numbers.
        is_least = b.icmp_signed("==", powers, code.constant(0))
        bits = b.shl(powers, code.constant(23))
        return b.bitcast(b.select(is_least, code.constant(1 << 22), bits), FLOATS)
    if format.is_shared:
        return code.broadcast(code.load(address, 0, FLOAT), FLOATS)
    return code.load(address, 0, FLOATS)


def _weights_of_step(
    code: TileCode, address: Any, scale: Any, format: Fp8Format, element: Any
) -> list[Any]:
    """Sixteen weights of one input, or of two, as they are expanded to the element's type, in
    float32."""
    if not format.is_float4:
        return [_weights(code, address, scale, element)]
    b = code.builder
    pairs = b.zext(code.load(address, 0, NARROW), INTS)
    return [_float4(code, pairs, scale, shift) for shift in (0, 4)]


def _float4(code: TileCode, pairs: Any, scale: Any, shift: int) -> Any:
    """Weights of numbers of e2m1 from bit `shift` on, which every element's type holds."""
    b = code.builder
    sign = b.and_(b.shl(pairs, code.constant(28 - shift)), code.constant(1 << 31))
    place = 22 - shift
    rest = b.and_(b.shl(pairs, code.constant(place)), code.constant(7 << 22))
    # 2 ** 126 takes the exponent from e2m1's to float32's, of numbers below the normal ones too.
    number = b.bitcast(b.or_(sign, rest), FLOATS)
    number = b.fmul(number, b.bitcast(code.constant((127 + 126) << 23), FLOATS))
    return b.fmul(number, scale)


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
