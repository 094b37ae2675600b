"""Tiles of weights in block formats, as LLVM code: their products with rows of 8-bit activations,
and their rows expanded. The order of bytes is `kernels.quant.block_formats`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..quant.block_activations import ROW_BYTES
from ..quant.block_formats import BLOCK, FORMATS, TILE_ROWS, BlockFormat
from .compiler.simd_types import F32, I64
from .tile_code import (
    FLOATS,
    INT,
    INTS,
    LONG,
    NARROW,
    VECTOR_BYTES,
    TileBlock,
    TileCode,
    add_block,
    add_blocks,
    has_rest,
    store_outputs,
)


def add_tile(
    code: TileCode,
    totals: list[Any],
    format: BlockFormat,
    tile: Any,
    units: Any,
    rows: Any,
    row_bytes: Any,
    rests: Any,
) -> None:
    """Adds the product of a tile of `units` units to the sixteen outputs of each row, which
    `totals` points to; see `add_blocks` for `rests`."""
    b = code.builder
    blocks = format.unit // BLOCK
    with cgutils.for_range(b, units, intp=LONG) as loop:
        at = b.add(tile, b.mul(loop.index, ir.Constant(LONG, TILE_ROWS * format.unit_bytes)))
        first = b.add(rows, b.mul(loop.index, ir.Constant(LONG, blocks * ROW_BYTES)))
        are_last = format.is_nested and rests is not None
        for i, block in enumerate(blocks_of(code, at, format)):
            address = b.add(first, ir.Constant(LONG, i * ROW_BYTES))
            add_blocks(code, totals, block, address, row_bytes, None if are_last else rests)
        if are_last:
            _add_rests(code, totals, format, at, first, row_bytes, rests)


def _add_rests(
    code: TileCode,
    totals: list[Any],
    format: BlockFormat,
    unit: Any,
    first: Any,
    row_bytes: Any,
    rests: Any,
) -> None:
    """Adds the products of a unit with the remainders of rows, after those with all of its blocks:
    keeping words for the few remainders would leave no registers to the others. One code serves all
    rows, so their sums are in memory meanwhile."""
    b = code.builder
    num_rows = len(totals)
    offsets = [ir.Constant(LONG, i * ROW_BYTES) for i in range(format.unit // BLOCK)]
    rows = [b.add(first, b.mul(row_bytes, ir.Constant(LONG, row))) for row in range(num_rows)]
    with b.if_then(
        has_rest(code, [b.add(row, offset) for row in rows for offset in offsets]), likely=False
    ):
        sums = cgutils.alloca_once(b, FLOATS, num_rows)
        places = [b.gep(sums, [ir.Constant(LONG, row)]) for row in range(num_rows)]
        for total, place in zip(totals, places, strict=True):
            b.store(b.load(total), place)
        with cgutils.for_range(b, ir.Constant(LONG, num_rows), intp=LONG) as loop:
            row = b.add(first, b.mul(row_bytes, loop.index))
            place = b.gep(sums, [loop.index])
            for block, offset in zip(
                blocks_of(code, code.hidden(unit), format), offsets, strict=True
            ):
                address = b.add(row, offset)
                with b.if_then(has_rest(code, [address])):
                    b.store(add_block(code, b.load(place), block, b.add(address, rests)), place)
        for total, place in zip(totals, places, strict=True):
            b.store(b.load(place), total)


def blocks_of(code: TileCode, address: Any, format: BlockFormat) -> Any:
    """The blocks of a unit, in their order."""
    scale = code.halves(address, 0)
    minimum = code.halves(address, 2 * TILE_ROWS) if format.has_min else None
    zero = code.constant(format.offset) if format.offset else None
    count = format.unit // BLOCK
    high_at = TILE_ROWS * format.scales
    high_bytes = 0 if format.bits == 8 else (format.bits - 4) * VECTOR_BYTES
    low_at = high_at + high_bytes * count
    for block in range(count):
        words = _words(code, address, format, high_at + high_bytes * block, low_at, block)
        factors, min_factor = (
            _factors(code, address, format, block) if format.is_nested else ((), None)
        )
        yield TileBlock(
            words=words,
            most=(1 << format.bits) - 1,
            scale=scale,
            zero=zero,
            minimum=minimum,
            factors=factors,
            min_factor=min_factor,
        )


def _words(
    code: TileCode, address: Any, format: BlockFormat, high_at: int, low_at: int, block: int
) -> list[Any]:
    if format.bits == 8:
        return [
            code.load(address, low_at + (8 * block + step) * VECTOR_BYTES, INTS)
            for step in range(8)
        ]
    pairs = [code.load(address, low_at + (4 * block + i) * VECTOR_BYTES, INTS) for i in range(4)]
    words = [code.bits(pairs[step // 2], -4 * (step % 2), 15) for step in range(8)]
    if format.bits == 5:
        high = code.load(address, high_at, INTS)
        words = [
            code.builder.or_(word, code.bits(high, 4 - step, 16)) for step, word in enumerate(words)
        ]
    if format.bits == 6:
        both = [code.load(address, high_at + i * VECTOR_BYTES, INTS) for i in range(2)]
        words = [
            code.builder.or_(word, code.bits(both[step // 4], 4 - 2 * (step % 4), 48))
            for step, word in enumerate(words)
        ]
    return words


def _factors(
    code: TileCode, address: Any, format: BlockFormat, block: int
) -> tuple[Sequence[Any], Any]:
    """The int32 factors of the block's scale and minimum."""
    b = code.builder
    if not format.has_min:
        at = 2 * TILE_ROWS
        return [
            b.sext(code.load(address, at + (2 * block + i) * TILE_ROWS, NARROW), INTS)
            for i in range(2)
        ], None
    at = 4 * TILE_ROWS
    low = b.zext(code.load(address, at + block * TILE_ROWS, NARROW), INTS)
    high = b.zext(code.load(address, at + (8 + block // 2) * TILE_ROWS, NARROW), INTS)
    high = b.lshr(high, code.constant(4 * (block % 2)))
    scale = b.or_(
        b.and_(low, code.constant(15)), b.shl(b.and_(high, code.constant(3)), code.constant(4))
    )
    minimum = b.or_(
        b.lshr(low, code.constant(4)), b.shl(b.and_(high, code.constant(12)), code.constant(2))
    )
    return [scale], minimum


@intrinsic(prefer_literal=True)
def expand_row(
    typing: Any, tile: Any, units: Any, row: Any, out: Any, type_id: Any, element: Any
) -> Any:
    """Stores one of a tile's sixteen rows as numbers of the type that `element` names."""
    format = FORMATS[type_id.literal_value]

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        code = TileCode(builder, context.codegen().magic_tuple()[2])
        size = 4 if element == F32 else 2
        lanes = ir.Constant(INTS, list(range(TILE_ROWS)))
        is_own = builder.icmp_unsigned("==", lanes, code.broadcast(builder.trunc(a[2], INT), INTS))
        with cgutils.for_range(builder, a[1], intp=LONG) as loop:
            at = builder.add(
                a[0], builder.mul(loop.index, ir.Constant(LONG, TILE_ROWS * format.unit_bytes))
            )
            first = builder.add(
                a[3], builder.mul(loop.index, ir.Constant(LONG, format.unit * size))
            )
            for i, block in enumerate(blocks_of(code, at, format)):
                for half in range(2):
                    values = _expanded(code, block, half, is_own, format)
                    p_half = builder.add(
                        first, ir.Constant(LONG, (2 * i + half) * TILE_ROWS * size)
                    )
                    store_outputs(code, values, p_half, ir.Constant(LONG, TILE_ROWS), element)
        return context.get_dummy_value()

    return types.void(I64, I64, I64, I64, type_id, element), generate


def _expanded(code: TileCode, block: TileBlock, half: int, is_own: Any, format: BlockFormat) -> Any:
    """Sixteen successive weights of one of the tile's rows, in the order of operations of
    `block_formats.expand`."""
    b = code.builder
    words = ir.Constant(ir.VectorType(INT, 4), ir.Undefined)
    for step in range(4):
        word = code.one_of(block.words[4 * half + step], is_own)
        words = b.insert_element(words, word, ir.Constant(INT, step))
    values = b.sub(b.zext(b.bitcast(words, NARROW), INTS), code.constant(format.offset))
    scale = block.scale
    minimum = block.minimum
    if block.factors:
        scale = b.fmul(scale, b.sitofp(block.factors[half % len(block.factors)], FLOATS))
    product = b.fmul(b.sitofp(values, FLOATS), code.broadcast(code.one_of(scale, is_own), FLOATS))
    if minimum is None:
        return product
    if block.min_factor is not None:
        minimum = b.fmul(minimum, b.sitofp(block.min_factor, FLOATS))
    combine = b.fsub if format.is_nested else b.fadd
    return combine(product, code.broadcast(code.one_of(minimum, is_own), FLOATS))
