"""Products with low-rank adapters on a CPU, by tiles of rows with one adapter. Twin:
`kernels.adapters.adapter_product`.

Factors are read, and widened, once for the rows of a full tile. Sums of a row are made in the same
order in a full tile and alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numba import njit

from ..adapters.slab import MAX_RANK, PIECE, RANK_UNIT, Slab, SlabLayer
from .adapter_tiles import NO_ROW, TILE, adapter_tiles
from .compiler.compiled import Kernel, argument, items
from .compiler.scalars import (
    ask_for_line,
    float32_at,
    int32_at,
    int64_at,
    number_at,
    put,
    size_of,
)
from .compiler.simd import add, fma, load, mul, splat, store, sum_of
from .compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES

_TOGETHER = 4
"""Number of ranks, or of vectors of outputs, that are summed at the same time for a row."""


_AHEAD = 2
"""Rounds of outputs before which they are prefetched."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of a pass and their adapters."""

    slots: torch.Tensor
    """int32 [T] slot of each row's adapter; −1: none."""
    tiles: torch.Tensor
    """int32 [T, TILE]; see `adapter_tiles`."""


class AdapterAddition:
    """Adds the products of one layer's adapters; see `add_adapters_twin`. Inputs and outputs of
    every projection divide by 16."""

    def __init__(self, slab: Slab, layer: SlabLayer) -> None:
        self._slab = slab
        self._layer = layer
        self._parts = torch.tensor(layer.parts)

    def begin(self, x: torch.Tensor, rows: AdapterRows) -> None:
        """Does nothing: the layer's product takes all cores."""

    def finish(self, x: torch.Tensor, y: torch.Tensor, begun: None, rows: AdapterRows) -> None:
        """Adds to y [T, N] what x [T, K] makes with the adapters of its rows."""
        slab = self._slab
        layer = self._layer
        assert x.is_contiguous()
        assert y.is_contiguous()
        numbers = slab.of(layer)
        assert numbers.dtype == x.dtype
        shrunk = torch.empty(len(x), MAX_RANK)
        KERNEL(
            x.dtype,
            len(x),
            len(x) * RANK_UNIT * layer.num_inputs,
            *(x.data_ptr(), y.data_ptr(), shrunk.data_ptr(), rows.slots.data_ptr()),
            *(numbers.data_ptr(), slab.num_ranks.data_ptr(), slab.factors.data_ptr()),
            *(self._parts.data_ptr(), len(layer.parts), layer.num_inputs, layer.num_outputs),
            *(numbers.stride(0), layer.column, slab.factors.shape[1]),
            rows.tiles.data_ptr(),
        )


class RowAdditions:
    """Operations of a platform for adapters; see `AdapterPlatform`."""

    def plan_adapters(self, slots: torch.Tensor, slab: Slab) -> AdapterRows:
        return AdapterRows(slots, adapter_tiles(slots, len(slab.num_ranks)))

    def adapter_addition(self, slab: Slab, layer: SlabLayer) -> AdapterAddition:
        return AdapterAddition(slab, layer)


@njit
def _put_rounded(p_out: int, x: Any, element: Any) -> None:
    """Stores x as float32, rounded to an element."""
    put(p_out, x, element)
    put(p_out, number_at(p_out, element), F32_ELEMENT)


@njit
def _with_factors(x: Any, factors: Any, sums: Any) -> Any:
    """Adds the products of a row's vector with four vectors of factors."""
    return (
        fma(x, factors[0], sums[0]),
        fma(x, factors[1], sums[1]),
        fma(x, factors[2], sums[2]),
        fma(x, factors[3], sums[3]),
    )


@njit
def _added(totals: Any, sums: Any) -> Any:
    return (
        totals[0] + sum_of(sums[0]),
        totals[1] + sum_of(sums[1]),
        totals[2] + sum_of(sums[2]),
        totals[3] + sum_of(sums[3]),
    )


@njit
def _put_ranks(p_out: int, totals: Any, element: Any) -> None:
    _put_rounded(p_out, totals[0], element)
    _put_rounded(p_out + 4, totals[1], element)
    _put_rounded(p_out + 8, totals[2], element)
    _put_rounded(p_out + 12, totals[3], element)


@njit
def _four(p_first: int, stride: int, element: Any) -> Any:
    """Four vectors of factors that begin `stride` bytes apart."""
    return (
        load(p_first, element),
        load(p_first + stride, element),
        load(p_first + 2 * stride, element),
        load(p_first + 3 * stride, element),
    )


@njit
def _nothing() -> Any:
    zero = splat(F32(0))
    return zero, zero, zero, zero


@njit
def _shrink(p_x: int, p_a: int, p_shrunk: int, sizes: Any, element: Any) -> None:
    """Writes x [K] times A [r, K], whose rows lie `stride` bytes apart."""
    num_inputs, stride, rank = sizes
    size = size_of(element)
    for j in range(0, rank, _TOGETHER):
        p_ranks = p_a + j * stride
        totals = F32(0), F32(0), F32(0), F32(0)
        for begin in range(0, num_inputs, PIECE):
            sums = _nothing()
            for k in range(begin, min(begin + PIECE, num_inputs), NUM_LANES):
                factors = _four(p_ranks + k * size, stride, element)
                sums = _with_factors(load(p_x + k * size, element), factors, sums)
            totals = _added(totals, sums)
        _put_ranks(p_shrunk + 4 * j, totals, element)


@njit
def _shrink_tile(p_rows: Any, p_a: int, p_shrunk: Any, sizes: Any, element: Any) -> None:
    """Like `_shrink`, of four rows."""
    num_inputs, stride, rank = sizes
    size = size_of(element)
    for j in range(0, rank, _TOGETHER):
        p_ranks = p_a + j * stride
        total_0 = total_1 = total_2 = total_3 = F32(0), F32(0), F32(0), F32(0)
        for begin in range(0, num_inputs, PIECE):
            sum_0 = sum_1 = sum_2 = sum_3 = _nothing()
            for k in range(begin, min(begin + PIECE, num_inputs), NUM_LANES):
                at = k * size
                factors = _four(p_ranks + at, stride, element)
                sum_0 = _with_factors(load(p_rows[0] + at, element), factors, sum_0)
                sum_1 = _with_factors(load(p_rows[1] + at, element), factors, sum_1)
                sum_2 = _with_factors(load(p_rows[2] + at, element), factors, sum_2)
                sum_3 = _with_factors(load(p_rows[3] + at, element), factors, sum_3)
            total_0 = _added(total_0, sum_0)
            total_1 = _added(total_1, sum_1)
            total_2 = _added(total_2, sum_2)
            total_3 = _added(total_3, sum_3)
        _put_ranks(p_shrunk[0] + 4 * j, total_0, element)
        _put_ranks(p_shrunk[1] + 4 * j, total_1, element)
        _put_ranks(p_shrunk[2] + 4 * j, total_2, element)
        _put_ranks(p_shrunk[3] + 4 * j, total_3, element)


@njit
def _add(p_y: int, delta: Any, factor: Any, element: Any) -> None:
    store(p_y, add(load(p_y, element), mul(delta, factor)), element)


@njit
def _add_vectors(p_y: int, deltas: Any, factor: Any, element: Any) -> None:
    step = NUM_LANES * size_of(element)
    _add(p_y, deltas[0], factor, element)
    _add(p_y + step, deltas[1], factor, element)
    _add(p_y + 2 * step, deltas[2], factor, element)
    _add(p_y + 3 * step, deltas[3], factor, element)


@njit
def _ask_ahead(p_row: int, step: int) -> None:
    """Prefetches a rank's outputs of a later round: they lie too far from those of the next rank
    for the processor to guess."""
    p_later = p_row + _AHEAD * _TOGETHER * step
    ask_for_line(p_later)
    ask_for_line(p_later + 2 * step)


@njit
def _expand(
    p_shrunk: int, p_b: int, p_y: int, sizes: Any, begin: int, factor: Any, element: Any
) -> None:
    """Adds the factor times shrunk [r] times Bᵀ [r, N], whose rows lie `stride` bytes apart, to
    y [N] from output `begin` on."""
    num_outputs, stride, rank = sizes
    size = size_of(element)
    step = NUM_LANES * size
    n = begin
    while n + _TOGETHER * NUM_LANES <= num_outputs:
        at = n * size
        sums = _nothing()
        for j in range(rank):
            p_row = p_b + j * stride + at
            _ask_ahead(p_row, step)
            factors = _four(p_row, step, element)
            sums = _with_factors(splat(float32_at(p_shrunk + 4 * j)), factors, sums)
        _add_vectors(p_y + at, sums, factor, element)
        n += _TOGETHER * NUM_LANES
    while n < num_outputs:
        total = splat(F32(0))
        for j in range(rank):
            shrunk = splat(float32_at(p_shrunk + 4 * j))
            total = fma(shrunk, load(p_b + j * stride + n * size, element), total)
        _add(p_y + n * size, total, factor, element)
        n += NUM_LANES


@njit
def _expand_tile(
    p_shrunk: Any, p_b: int, p_rows: Any, sizes: Any, factor: Any, element: Any
) -> int:
    """Like `_expand`, of four rows; returns the first output that is left to do."""
    num_outputs, stride, rank = sizes
    size = size_of(element)
    step = NUM_LANES * size
    n = 0
    while n + _TOGETHER * NUM_LANES <= num_outputs:
        at = n * size
        sum_0 = sum_1 = sum_2 = sum_3 = _nothing()
        for j in range(rank):
            p_row = p_b + j * stride + at
            _ask_ahead(p_row, step)
            factors = _four(p_row, step, element)
            sum_0 = _with_factors(splat(float32_at(p_shrunk[0] + 4 * j)), factors, sum_0)
            sum_1 = _with_factors(splat(float32_at(p_shrunk[1] + 4 * j)), factors, sum_1)
            sum_2 = _with_factors(splat(float32_at(p_shrunk[2] + 4 * j)), factors, sum_2)
            sum_3 = _with_factors(splat(float32_at(p_shrunk[3] + 4 * j)), factors, sum_3)
        _add_vectors(p_rows[0] + at, sum_0, factor, element)
        _add_vectors(p_rows[1] + at, sum_1, factor, element)
        _add_vectors(p_rows[2] + at, sum_2, factor, element)
        _add_vectors(p_rows[3] + at, sum_3, factor, element)
        n += _TOGETHER * NUM_LANES
    return n


@njit
def _of_rows(rows: Any, p_first: int, num_bytes: int) -> Any:
    """Addresses of four rows of so many bytes."""
    return (
        p_first + rows[0] * num_bytes,
        p_first + rows[1] * num_bytes,
        p_first + rows[2] * num_bytes,
        p_first + rows[3] * num_bytes,
    )


@njit
def _moved(addresses: Any, num_bytes: int) -> Any:
    return (
        addresses[0] + num_bytes,
        addresses[1] + num_bytes,
        addresses[2] + num_bytes,
        addresses[3] + num_bytes,
    )


@njit
def _add_to_rows(arguments: int, rows: Any, num_rows: int, element: Any) -> None:
    """Adds to a full tile of rows, or to the first ones of the four."""
    size = size_of(element)
    num_parts, num_inputs = argument(arguments, 8), argument(arguments, 9)
    slot = int32_at(argument(arguments, 3) + 4 * rows[0])
    stride = argument(arguments, 11) * size
    p_x = _of_rows(rows, argument(arguments, 0), num_inputs * size)
    p_y = _of_rows(rows, argument(arguments, 1), argument(arguments, 10) * size)
    p_shrunk = _of_rows(rows, argument(arguments, 2), MAX_RANK * 4)
    rank = int32_at(argument(arguments, 5) + 4 * slot)
    p_a = argument(arguments, 4) + slot * RANK_UNIT * stride
    p_b = p_a + num_parts * num_inputs * size
    first_factor = slot * argument(arguments, 13) + argument(arguments, 12)
    p_factors = argument(arguments, 6) + 4 * first_factor
    for part in range(num_parts):
        num_outputs = int64_at(argument(arguments, 7) + 8 * part)
        factor = float32_at(p_factors + 4 * part)
        inputs = num_inputs, stride, rank
        outputs = num_outputs, stride, rank
        if factor != F32(0):
            done = 0
            if num_rows == TILE:
                _shrink_tile(p_x, p_a, p_shrunk, inputs, element)
                done = _expand_tile(p_shrunk, p_b, p_y, outputs, splat(factor), element)
            for i in range(num_rows):
                if num_rows < TILE:
                    _shrink(p_x[i], p_a, p_shrunk[i], inputs, element)
                if done < num_outputs:
                    _expand(p_shrunk[i], p_b, p_y[i], outputs, done, splat(factor), element)
        p_a += num_inputs * size
        p_b += num_outputs * size
        p_y = _moved(p_y, num_outputs * size)


def _tiles(element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            p_tile = argument(arguments, 14) + 4 * TILE * i
            rows = (
                int32_at(p_tile),
                int32_at(p_tile + 4),
                int32_at(p_tile + 8),
                int32_at(p_tile + 12),
            )
            num_rows = 0
            while num_rows < TILE and rows[num_rows] != NO_ROW:
                num_rows += 1
            if num_rows:
                _add_to_rows(arguments, rows, num_rows, element)

    return work


KERNEL = Kernel(_tiles(F32_ELEMENT), _tiles(BF16_ELEMENT))
