"""Tiles of weights in groups of inputs, as LLVM code: their products with rows of 8-bit
activations. The order of bytes is `kernels.quant.group_tiles`'s."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils

from ..quant.block_activations import ROW_BYTES
from ..quant.block_formats import TILE_ROWS
from ..quant.group_tiles import GroupFormat
from .tile_code import FLOATS, INTS, LONG, NARROW, VECTOR_BYTES, TileBlock, TileCode, add_blocks

BLOCKS_BITS = 32
"""Number of lower bits of `units` of such a tile; they count groups, and the bits above them the
blocks of each."""


def units_of(num_groups: int, blocks_of_group: int) -> int:
    return num_groups | blocks_of_group << BLOCKS_BITS


def add_tile(
    code: TileCode,
    totals: list[Any],
    format: GroupFormat,
    tile: Any,
    units: Any,
    rows: Any,
    row_bytes: Any,
    rests: Any,
) -> None:
    """Like `block_tiles.add_tile`."""
    b = code.builder
    num_groups = b.and_(units, ir.Constant(LONG, (1 << BLOCKS_BITS) - 1))
    blocks = b.lshr(units, ir.Constant(LONG, BLOCKS_BITS))
    head = format.scale_bytes + TILE_ROWS
    group_bytes = b.add(
        b.mul(blocks, ir.Constant(LONG, format.block_bytes)), ir.Constant(LONG, head)
    )
    with cgutils.for_range(b, num_groups, intp=LONG) as group:
        at = b.add(tile, b.mul(group.index, group_bytes))
        first = b.add(rows, b.mul(b.mul(group.index, blocks), ir.Constant(LONG, ROW_BYTES)))
        scale = _scales(code, at, format)
        zero = b.zext(code.load(at, format.scale_bytes, NARROW), INTS)
        with cgutils.for_range(b, blocks, intp=LONG) as inner:
            words = b.add(at, b.mul(inner.index, ir.Constant(LONG, format.block_bytes)))
            most = (1 << format.bits) - 1
            block = TileBlock(
                words=_words(code, words, head, format), most=most, scale=scale, zero=zero
            )
            address = b.add(first, b.mul(inner.index, ir.Constant(LONG, ROW_BYTES)))
            add_blocks(code, totals, block, address, row_bytes, rests)


def _scales(code: TileCode, address: Any, format: GroupFormat) -> Any:
    if format.scale_dtype == torch.float32:
        return code.load(address, 0, FLOATS)
    return (
        code.halves(address, 0)
        if format.scale_dtype == torch.float16
        else code.brain_halves(address, 0)
    )


def _words(code: TileCode, address: Any, offset: int, format: GroupFormat) -> list[Any]:
    if format.bits == 8:
        return [code.load(address, offset + step * VECTOR_BYTES, INTS) for step in range(8)]
    pairs = [code.load(address, offset + i * VECTOR_BYTES, INTS) for i in range(4)]
    return [code.bits(pairs[step // 2], -4 * (step % 2), 15) for step in range(8)]
