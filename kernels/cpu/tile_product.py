"""x @ weight.T of packed weights on a CPU, tile after tile of sixteen outputs. `TileProduct` has
activations in 8 bits.

Weights are read once for every eight rows (four in the K formats), from a cache after the first.
One order along K serves every number of rows. Measured on one Zen 4 core: 110 · 10⁹ multiplications
a second for one row, 160 to 175 · 10⁹ from four rows on (Q4_0, Q4_1 and Q8_0, 2026-11-23).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..quant.block_activations import NUM_PARTS, NUM_PARTS_OF_TOKENS, ROW_BYTES
from ..quant.block_formats import BLOCK, FORMATS, TILE_ROWS, BlockFormat
from ..quant.fp8_tiles import FP8_FORMATS, Fp8Format
from ..quant.group_tiles import GROUP_FORMATS, GroupFormat
from . import block_tiles, fp8_tiles, group_tiles
from .block_activations import quantize, quantize_blocks, quantize_rows, quantize_tokens
from .compiler.compiled import Kernel, address_of, argument, items
from .compiler.scalars import size_of, take_one
from .compiler.simd_types import BF16_ELEMENT, F32_ELEMENT, I64
from .tile_code import FLOATS, LONG, TileCode, store_outputs

ITEMS_PER_THREAD = 16
PRIVATE = 4096
"""Number of activations up to which every thread rounds all of them for itself."""
ROW_GROUP = 64
"""Number of rows whose activations stay in a cache while tiles pass."""
FIRST_GROUP_FORMAT = 1 << 10
"""First number of formats of groups, behind those of ggml's types."""
FIRST_FP8_FORMAT = 1 << 11
"""First number of formats of e4m3 weights, whose activations are in float32."""
_P_ROWS = 5
_P_OUT = 7
_P_X = 12
"""Places of addresses in the memory of a run: arguments 3, 5 and 10 of `_work`."""


class Part(NamedTuple):
    """Some outputs of a weight, of one format."""

    format: BlockFormat | GroupFormat
    tiles: torch.Tensor
    """uint8 [tiles, units, bytes]"""
    units: int
    """Number of units in a tile, as its format counts them."""
    num_outputs: int


class TileProduct:
    """x @ weight.T with one weight; the facts of the weight are looked up once."""

    def __init__(
        self, parts: Sequence[Part], num_inputs: int, *, rounds_tokens: bool = False
    ) -> None:
        """Outputs of parts follow one another; `rounds_tokens`: activations of a row have one
        scale."""
        self._quantize = quantize_tokens if rounds_tokens else quantize
        self._num_outputs = sum(part.num_outputs for part in parts)
        self._row_bytes = num_parts_of(rounds_tokens) * (num_inputs // BLOCK) * ROW_BYTES
        self._calls: list[_Call] = []
        at = 0
        for part in parts:
            self._calls.append(
                _Call(part, self._row_bytes, at, self._num_outputs, rounds_tokens=rounds_tokens)
            )
            at += part.num_outputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product of x [T, K], contiguous, as [T, N] in x's dtype."""
        assert x.is_contiguous()
        num_rows = x.shape[0]
        num_threads = torch.get_num_threads()
        is_private = x.numel() <= PRIVATE
        num_bytes = num_threads * num_rows * self._row_bytes
        rows = torch.empty(num_bytes, dtype=torch.uint8) if is_private else self._quantize(x)
        out = x.new_empty(num_rows, self._num_outputs)
        p_rows = rows.data_ptr()
        p_out = out.data_ptr()
        p_x = x.data_ptr() if is_private else 0
        for call in self._calls:
            memory = call.memory(num_rows, num_threads)
            memory[_P_ROWS] = p_rows
            memory[_P_X] = p_x
            memory[_P_OUT] = p_out + call.first_output * x.itemsize
            call.kernel.run(x.dtype, call.num_bytes, memory)
        return out


class _Call:
    """One call that a part's product makes. What only the numbers of rows and threads decide is
    kept from step to step: Python's share of a step of one row is large."""

    def __init__(
        self,
        part: Part,
        row_bytes: int,
        first_output: int,
        row_outputs: int,
        *,
        rounds_tokens: bool,
    ) -> None:
        """`row_bytes`: of activations; `row_outputs`: number of outputs of all parts, from whose
        `first_output` on this part's lie."""
        self.kernel = kernel_of(part.format, rounds_tokens=rounds_tokens)
        self.num_bytes = part.tiles.numel()
        self.first_output = first_output
        self._tiles = part.tiles
        self._units = part.units
        self._num_outputs = part.num_outputs
        self._row_bytes = row_bytes
        self._row_outputs = row_outputs
        self._last: tuple[tuple[int, int], array[int]] | None = None

    def memory(self, num_rows: int, num_threads: int) -> array[int]:
        """Memory for one run of the kernel, without the addresses of rows, outputs and x."""
        last = self._last
        key = (num_rows, num_threads)
        if last is None or last[0] != key:
            last = self._last = key, self._arguments(num_rows, num_threads)
        return last[1][:]

    def _arguments(self, num_rows: int, num_threads: int) -> array[int]:
        tiles = self._tiles
        num_tiles = len(self._tiles)
        tiles_per_item = max(1, num_tiles // (ITEMS_PER_THREAD * num_threads))
        where = tiles.data_ptr(), self._units, tiles.shape[1] * tiles.shape[2]
        rows = (0, self._row_bytes)
        out = (0, self._row_outputs, num_rows, self._num_outputs)
        return array(
            "q", (0, -(-num_tiles // tiles_per_item), *where, *rows, *out, tiles_per_item, 0, 0)
        )


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
    """Rounds rows that have so many places for blocks, those for rests among them."""
    if rounds_tokens:
        quantize_rows(p_x, p_rows, num_rows, num_places, element)
    else:
        quantize_blocks(p_x, p_rows, num_rows, num_places // NUM_PARTS, element)


def tiles_of(number: int, rounds_tokens: bool, element: Any) -> Any:
    """Returns the function that multiplies some tiles of a weight with rows of activations."""
    has_eight = FIRST_GROUP_FORMAT <= number < FIRST_FP8_FORMAT
    num_parts = num_parts_of(rounds_tokens)
    if number < FIRST_GROUP_FORMAT:
        # A unit of the nested formats is eight times as long, and so is its code.
        has_eight = not FORMATS[number].is_nested

    @njit
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
    ) -> None:
        """Tiles first … last − 1 of a weight of `num_outputs` outputs; `out_bytes`: from the
        outputs of a row to those of the next."""
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

    return multiply_tiles


def _work(number: int, rounds_tokens: bool, element: Any) -> Any:
    rounds = number < FIRST_FP8_FORMAT
    multiply_tiles = tiles_of(number, rounds_tokens, element)

    def work(arguments: int) -> None:
        row_bytes = argument(arguments, 4)
        num_rows = argument(arguments, 7)
        num_outputs = argument(arguments, 8)
        tiles_per_item = argument(arguments, 9)
        p_rows = argument(arguments, 3)
        if rounds and argument(arguments, 10):
            # Few numbers: each thread has them for itself, which takes less time than a kernel
            # before this one.
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
            )

    return work
