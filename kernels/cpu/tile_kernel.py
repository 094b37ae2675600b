"""The kernels of products of packed weights on a CPU, one for each format: a tile of sixteen
outputs by a few rows of activations, read once for every eight rows (four in the K formats)."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..quant.block_activations import NUM_PARTS, NUM_PARTS_OF_TOKENS, ROW_BYTES
from ..quant.block_formats import FORMATS, TILE_ROWS, BlockFormat
from ..quant.fp8_tiles import FP8_FORMATS, Fp8Format
from ..quant.group_tiles import GROUP_FORMATS, GroupFormat
from . import block_tiles, fp8_tiles, group_tiles
from .block_rounding import quantize_blocks, quantize_rows
from .compiler.compiled import Kernel, address_of, argument, items
from .compiler.scalars import size_of, take_one
from .compiler.simd_types import BF16_ELEMENT, F32_ELEMENT, I64
from .tile_code import FLOATS, LONG, TileCode, store_outputs

ROW_GROUP = 64
"""Number of rows whose activations stay in a cache while tiles pass."""
FIRST_GROUP_FORMAT = 1 << 10
"""First number of formats of groups, behind those of ggml's types."""
FIRST_FP8_FORMAT = 1 << 11
"""First number of formats of e4m3 weights, whose activations are in float32."""


@cache
def kernel_of(
    format: BlockFormat | GroupFormat | Fp8Format, *, rounds_tokens: bool = False
) -> Kernel:
    """The kernel whose arguments `TileProduct` hands over."""
    number = number_of(format)
    return Kernel(
        _work(number, rounds_tokens, F32_ELEMENT), _work(number, rounds_tokens, BF16_ELEMENT)
    )


def num_parts_of(rounds_tokens: bool) -> int:
    return NUM_PARTS_OF_TOKENS if rounds_tokens else NUM_PARTS


def number_of(format: BlockFormat | GroupFormat | Fp8Format) -> int:
    """The format as a constant of a kernel, whose machine code is kept by its constants."""
    if isinstance(format, BlockFormat):
        return format.type_id
    if isinstance(format, Fp8Format):
        return FIRST_FP8_FORMAT + FP8_FORMATS.index(format)
    return FIRST_GROUP_FORMAT + GROUP_FORMATS.index(format)


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing: Any,
    tile: Any,
    units: Any,
    rows: Any,
    row_bytes: Any,
    out: Any,
    out_bytes: Any,
    num_outputs: Any,
    number: Any,
    num_parts: Any,
    num_rows: Any,
    element: Any,
) -> Any:
    """Stores the product of a tile of `units` units with `num_rows` rows of activations,
    `row_bytes` apart.

    `out` is the address of the first row's first output, `out_bytes` the distance between rows of
    outputs. Of the sixteen outputs the first `num_outputs` are stored, all if it is greater.
    Constants: the format's number, the parts of a row of activations, the number of rows, and
    `element`, which names the type of outputs.
    """

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        code = TileCode(builder, context.codegen().magic_tuple()[2])
        totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(num_rows.literal_value)]
        for total in totals:
            builder.store(code.constant(0.0, FLOATS), total)
        format_number = number.literal_value
        rests = (
            builder.lshr(a[3], ir.Constant(LONG, 1))
            if num_parts.literal_value == NUM_PARTS
            else None
        )
        if format_number < FIRST_GROUP_FORMAT:
            block_tiles.add_tile(
                code, totals, FORMATS[format_number], a[0], a[1], a[2], a[3], rests
            )
        elif format_number < FIRST_FP8_FORMAT:
            group_format = GROUP_FORMATS[format_number - FIRST_GROUP_FORMAT]
            group_tiles.add_tile(code, totals, group_format, a[0], a[1], a[2], a[3], rests)
        else:
            fp8_format = FP8_FORMATS[format_number - FIRST_FP8_FORMAT]
            fp8_tiles.add_tile(code, totals, fp8_format, a[0], a[1], a[2], a[3], element)
        for row, total in enumerate(totals):
            address = builder.add(a[4], builder.mul(a[5], ir.Constant(LONG, row)))
            store_outputs(code, builder.load(total), address, a[6], element)
        return context.get_dummy_value()

    return types.void(
        I64, I64, I64, I64, I64, I64, I64, number, num_parts, num_rows, element
    ), generate


@njit
def _quantize(
    p_x: int, p_rows: int, num_rows: int, num_places: int, rounds_tokens: bool, element: Any
) -> None:
    """Rounds rows with `num_places` places for blocks, remainders included."""
    if rounds_tokens:
        quantize_rows(p_x, p_rows, num_rows, num_places, element)
    else:
        quantize_blocks(p_x, p_rows, num_rows, num_places // NUM_PARTS, element)


@njit(inline="always")
def multiply_tiles(
    p_tiles: int,
    tile_bytes: int,
    units: int,
    p_rows: int,
    row_bytes: int,
    p_out: int,
    out_bytes: int,
    num_rows: int,
    num_outputs: int,
    first: int,
    last: int,
    number: int,
    num_parts: int,
    has_eight: bool,
    element: Any,
) -> None:
    """Tiles first … last − 1 of a weight of `num_outputs` outputs; `out_bytes`: from the
    outputs of a row to those of the next. Constants of a kernel: `number`, `num_parts` and
    `element` of `multiply_tile`, and whether eight rows pass at once, `has_eight`."""
    for group in range(0, num_rows, ROW_GROUP):
        for tile in range(first, last):
            row = group
            end = min(group + ROW_GROUP, num_rows)
            p_tile = p_tiles + tile * tile_bytes
            rest = num_outputs - tile * TILE_ROWS
            p_row = p_rows + row * row_bytes
            p_at = p_out + row * out_bytes + tile * TILE_ROWS * size_of(element)
            while row < end:
                if has_eight and end - row >= 8:
                    count = 8
                    multiply_tile(
                        p_tile,
                        units,
                        p_row,
                        row_bytes,
                        p_at,
                        out_bytes,
                        rest,
                        number,
                        num_parts,
                        8,
                        element,
                    )
                elif end - row >= 4:
                    count = 4
                    multiply_tile(
                        p_tile,
                        units,
                        p_row,
                        row_bytes,
                        p_at,
                        out_bytes,
                        rest,
                        number,
                        num_parts,
                        4,
                        element,
                    )
                elif end - row >= 2:
                    count = 2
                    multiply_tile(
                        p_tile,
                        units,
                        p_row,
                        row_bytes,
                        p_at,
                        out_bytes,
                        rest,
                        number,
                        num_parts,
                        2,
                        element,
                    )
                else:
                    count = 1
                    multiply_tile(
                        p_tile,
                        units,
                        p_row,
                        row_bytes,
                        p_at,
                        out_bytes,
                        rest,
                        number,
                        num_parts,
                        1,
                        element,
                    )
                row = row + count
                p_row = p_row + count * row_bytes
                p_at = p_at + count * out_bytes


def passes_eight(number: int) -> bool:
    """Whether eight rows pass a tile of a format at once."""
    if number < FIRST_GROUP_FORMAT:
        # A unit of the nested formats is eight times as long, and so is its code.
        return not FORMATS[number].is_nested
    return number < FIRST_FP8_FORMAT


def _work(number: int, rounds_tokens: bool, element: Any) -> Any:
    rounds = number < FIRST_FP8_FORMAT
    num_parts = num_parts_of(rounds_tokens)
    has_eight = passes_eight(number)

    def work(arguments: int) -> None:
        row_bytes = argument(arguments, 4)
        num_rows = argument(arguments, 7)
        num_outputs = argument(arguments, 8)
        tiles_per_item = argument(arguments, 9)
        p_rows = argument(arguments, 3)
        if rounds and argument(arguments, 10):
            # Few activations: each thread rounds them for itself, which takes less time than a
            # kernel of its own before this one.
            p_rows += take_one(address_of(arguments, 11)) * num_rows * row_bytes
            _quantize(
                argument(arguments, 10),
                p_rows,
                num_rows,
                row_bytes // ROW_BYTES,
                rounds_tokens,
                element,
            )
        for item in items(arguments):
            first = item * tiles_per_item
            multiply_tiles(
                argument(arguments, 0),
                argument(arguments, 2),
                argument(arguments, 1),
                p_rows,
                row_bytes,
                argument(arguments, 5),
                argument(arguments, 6) * size_of(element),
                num_rows,
                num_outputs,
                first,
                min(first + tiles_per_item, -(-num_outputs // TILE_ROWS)),
                number,
                num_parts,
                has_eight,
                element,
            )

    return work
