"""x @ weight.T of block weights and activations in 8 bits on a CPU. Twin: `kernels.block_linear`.

Weights are read once for every eight rows (four in the K formats), from a cache after the first. One order along K
serves every number of rows. Measured on one Zen 4 core: 110 · 10⁹ multiplications a second for one row, 160 to
175 · 10⁹ from four rows on (Q4_0, Q4_1 and Q8_0, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..block_formats import FORMATS, TILE_ROWS, BlockFormat, BlockWeight
from .block_activations import quantize
from .block_tiles import multiply_tile
from .compiled import Kernel, argument, items
from .lanes import BF16_ELEMENT, F32_ELEMENT, size_of

ITEMS_PER_THREAD = 16
ROW_GROUP = 64
"""Rows whose activations stay in a cache while tiles pass."""


def block_linear(x: torch.Tensor, parts: Sequence[BlockWeight]) -> torch.Tensor:
    """x [T, K] contiguous, parts [N_i, K] whose outputs follow one another; returns [T, N] in x's dtype."""
    num_outputs = sum(part.num_rows for part in parts)
    out, at = x.new_empty(x.shape[0], num_outputs), 0
    rows = quantize(x)
    for part in parts:
        num_tiles = len(part.tiles)
        tiles_per_item = max(1, num_tiles // (ITEMS_PER_THREAD * torch.get_num_threads()))
        kernel_of(part.format)(
            x.dtype,
            -(-num_tiles // tiles_per_item),
            part.tiles.numel(),
            part.tiles.data_ptr(),
            part.tiles.shape[1],
            part.tiles.stride(0),
            rows.data_ptr(),
            rows.stride(0),
            out.data_ptr() + at * out.element_size(),
            num_outputs,
            x.shape[0],
            part.num_rows,
            tiles_per_item,
        )
        at += part.num_rows
    return out


@cache
def kernel_of(format: BlockFormat) -> Kernel:
    return Kernel(_work(format.type_id, F32_ELEMENT), _work(format.type_id, BF16_ELEMENT))


def _work(type_id: int, element: Any) -> Any:
    # A unit of the nested formats is eight times as long, and so is its code.
    has_eight = not FORMATS[type_id].is_nested

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
                        if has_eight and end - row >= 8:
                            count = 8
                            multiply_tile(p_tile, units, p_row, row_bytes, p_out, out_bytes, rest, type_id, 8, element)
                        elif end - row >= 4:
                            count = 4
                            multiply_tile(p_tile, units, p_row, row_bytes, p_out, out_bytes, rest, type_id, 4, element)
                        elif end - row >= 2:
                            count = 2
                            multiply_tile(p_tile, units, p_row, row_bytes, p_out, out_bytes, rest, type_id, 2, element)
                        else:
                            count = 1
                            multiply_tile(p_tile, units, p_row, row_bytes, p_out, out_bytes, rest, type_id, 1, element)
                        row, p_row, p_out = row + count, p_row + count * row_bytes, p_out + count * out_bytes

    return work
