"""x @ weight.T of e4m3 weights on a CPU, which reads eight bits a weight, tile after tile of sixteen outputs. Twin:
`kernels.fp8_linear`.

Every output is a sum in one order along K, so bits depend neither on how many rows are computed together nor on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..block_formats import BLOCK, TILE_ROWS
from ..fp8_tiles import FP8_FORMATS, Fp8Format, Fp8Tiles
from .compiled import Kernel, argument, items
from .fp8_tiles import add_tile, units_of
from .scalars import size_of
from .simd_types import BF16_ELEMENT, F32_ELEMENT, I64
from .tile_code import FLOATS, TileCode, store_outputs

ITEMS_PER_THREAD = 16
ROW_GROUP = 64
"""Number of rows whose activations stay in a cache while tiles pass."""


def fp8_product(weight: Fp8Tiles) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product of x [T, K], contiguous, as [T, N] in x's dtype, float32 or bfloat16."""
    tiles, (num_outputs, num_inputs) = weight.tiles, weight.shape
    kernel, tile_bytes = kernel_of(weight.format), tiles.shape[1] * tiles.shape[2]
    units = units_of(tiles.shape[1], weight.group_size // BLOCK)

    def product(x: torch.Tensor) -> torch.Tensor:
        rows, out = x.float().contiguous(), x.new_empty(len(x), num_outputs)
        tiles_per_item = max(1, len(tiles) // (ITEMS_PER_THREAD * torch.get_num_threads()))
        kernel(
            x.dtype,
            -(-len(tiles) // tiles_per_item),
            tiles.numel(),
            *(tiles.data_ptr(), units, tile_bytes, rows.data_ptr(), 4 * num_inputs),
            *(out.data_ptr(), num_outputs, len(x), num_outputs, tiles_per_item),
        )
        return out

    return product


def fp8_linear(x: torch.Tensor, weight: Fp8Tiles) -> torch.Tensor:
    """x [T, K], contiguous, times weight [N, K]: [T, N] in x's dtype."""
    return fp8_product(weight)(x)


@cache
def kernel_of(format: Fp8Format) -> Kernel:
    number = FP8_FORMATS.index(format)
    return Kernel(_work(number, F32_ELEMENT), _work(number, BF16_ELEMENT))


@intrinsic(prefer_literal=True)
def _multiply(
    typing: Any,
    tile: Any,
    units: Any,
    rows: Any,
    row_bytes: Any,
    out: Any,
    out_bytes: Any,
    num_outputs: Any,
    number: Any,
    num_rows: Any,
    element: Any,
) -> Any:
    """As `tile_product.multiply_tile`, of rows in float32; `number` is that of the format in `FP8_FORMATS`."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        code = TileCode(builder, context.codegen().magic_tuple()[2])
        totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(num_rows.literal_value)]
        for total in totals:
            builder.store(code.constant(0.0, FLOATS), total)
        add_tile(code, totals, FP8_FORMATS[number.literal_value], a[0], a[1], a[2], a[3], element)
        address = a[4]
        for total in totals:
            store_outputs(code, builder.load(total), address, a[6], element)
            address = builder.add(address, a[5])
        return context.get_dummy_value()

    return types.void(I64, I64, I64, I64, I64, I64, I64, number, num_rows, element), generate


def _work(number: int, element: Any) -> Any:
    def work(arguments: int) -> None:
        units, tile_bytes, row_bytes = argument(arguments, 1), argument(arguments, 2), argument(arguments, 4)
        out_bytes, num_rows = argument(arguments, 6) * size_of(element), argument(arguments, 7)
        num_outputs, tiles_per_item = argument(arguments, 8), argument(arguments, 9)
        for item in items(arguments):
            first = item * tiles_per_item
            last = min(first + tiles_per_item, -(-num_outputs // TILE_ROWS))
            for group in range(0, num_rows, ROW_GROUP):
                for tile in range(first, last):
                    row, end = group, min(group + ROW_GROUP, num_rows)
                    p_tile, rest = argument(arguments, 0) + tile * tile_bytes, num_outputs - tile * TILE_ROWS
                    p_row = argument(arguments, 3) + row * row_bytes
                    p_out = argument(arguments, 5) + row * out_bytes + tile * TILE_ROWS * size_of(element)
                    while row < end:
                        if end - row >= 4:
                            count = 4
                            _multiply(p_tile, units, p_row, row_bytes, p_out, out_bytes, rest, number, 4, element)
                        elif end - row >= 2:
                            count = 2
                            _multiply(p_tile, units, p_row, row_bytes, p_out, out_bytes, rest, number, 2, element)
                        else:
                            count = 1
                            _multiply(p_tile, units, p_row, row_bytes, p_out, out_bytes, rest, number, 1, element)
                        row, p_row, p_out = row + count, p_row + count * row_bytes, p_out + count * out_bytes

    return work
