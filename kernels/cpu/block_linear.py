"""x @ weight.T of block weights and activations in 8 bits on a CPU. Twin: `kernels.block_linear`.

Weights are read once for every eight rows (four in the K formats), from a cache after the first. One order along K
serves every number of rows. Measured on one Zen 4 core: 110 · 10⁹ multiplications a second for one row, 160 to
175 · 10⁹ from four rows on (Q4_0, Q4_1 and Q8_0, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ..block_activations import ROW_BYTES
from ..block_formats import BLOCK, FORMATS, TILE_ROWS, BlockFormat, BlockWeight
from .block_activations import quantize, quantize_blocks
from .block_tiles import multiply_tile
from .compiled import Kernel, address_of, argument, items
from .lanes import BF16_ELEMENT, F32_ELEMENT, size_of, take_one

ITEMS_PER_THREAD = 16
PRIVATE = 4096
"""Activations that every thread rounds for itself."""
ROW_GROUP = 64
"""Rows whose activations stay in a cache while tiles pass."""


class BlockProduct:
    """x @ weight.T with one weight, whose facts are looked up once."""

    def __init__(self, parts: Sequence[BlockWeight]) -> None:
        """parts [N_i, K], whose outputs follow one another."""
        # Kept: the calls know addresses alone.
        self._parts = tuple(parts)
        self._num_outputs = sum(part.num_rows for part in parts)
        self._row_bytes = parts[0].shape[1] // BLOCK * ROW_BYTES
        self._calls: list[_Call] = []
        at = 0
        for part in parts:
            self._calls.append(_Call.of(part, at))
            at += part.num_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] contiguous → [T, N] in x's dtype."""
        assert x.is_contiguous()
        num_rows, num_threads = x.shape[0], torch.get_num_threads()
        is_private = x.numel() <= PRIVATE
        rows = torch.empty(num_threads * num_rows * self._row_bytes, dtype=torch.uint8) if is_private else quantize(x)
        out = x.new_empty(num_rows, self._num_outputs)
        p_rows, p_out, p_x = rows.data_ptr(), out.data_ptr(), x.data_ptr() if is_private else 0
        for call in self._calls:
            tiles_per_item = max(1, call.num_tiles // (ITEMS_PER_THREAD * num_threads))
            call.kernel(
                x.dtype,
                -(-call.num_tiles // tiles_per_item),
                call.num_bytes,
                *call.tiles,
                p_rows,
                self._row_bytes,
                p_out + call.first_output * x.itemsize,
                self._num_outputs,
                num_rows,
                call.num_outputs,
                tiles_per_item,
                p_x,
                0,
            )
        return out


class _Call(NamedTuple):
    """What a part's product is told each time."""

    kernel: Kernel
    num_tiles: int
    num_bytes: int
    tiles: tuple[int, int, int]
    """Address, units of a tile and its bytes."""
    first_output: int
    num_outputs: int

    @classmethod
    def of(cls, part: BlockWeight, first_output: int) -> _Call:
        tiles = part.tiles
        where = tiles.data_ptr(), tiles.shape[1], tiles.shape[1] * tiles.shape[2]
        return cls(kernel_of(part.format), len(tiles), tiles.numel(), where, first_output, part.num_rows)


def block_linear(x: torch.Tensor, parts: Sequence[BlockWeight]) -> torch.Tensor:
    """x [T, K] contiguous, parts [N_i, K] whose outputs follow one another; returns [T, N] in x's dtype."""
    return BlockProduct(parts)(x)


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
        p_rows = argument(arguments, 3)
        if argument(arguments, 10):
            # Few numbers: each thread has them for itself, which takes less time than a kernel before this one.
            p_rows += take_one(address_of(arguments, 11)) * num_rows * row_bytes
            quantize_blocks(argument(arguments, 10), p_rows, num_rows * (row_bytes // ROW_BYTES), element)
        for item in items(arguments):
            first = item * tiles_per_item
            last = min(first + tiles_per_item, -(-num_outputs // TILE_ROWS))
            for group in range(0, num_rows, ROW_GROUP):
                for tile in range(first, last):
                    row, end = group, min(group + ROW_GROUP, num_rows)
                    p_tile, rest = argument(arguments, 0) + tile * tile_bytes, num_outputs - tile * TILE_ROWS
                    p_row = p_rows + row * row_bytes
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
