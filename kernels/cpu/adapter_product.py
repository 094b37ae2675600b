"""Products with low-rank adapters on a CPU, row by row. Twin:
`kernels.adapters.adapter_product`."""

from __future__ import annotations

from typing import Any

import torch
from numba import njit

from ..adapters.slab import MAX_RANK, PIECE, RANK_UNIT, Slab, SlabLayer
from .compiler.compiled import Kernel, argument, items
from .compiler.scalars import float32_at, int32_at, int64_at, number_at, put, size_of
from .compiler.simd import add, fma, load, mul, splat, store, sum_of
from .compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES

_TOGETHER = 4
"""Number of ranks, or of vectors of outputs, that are summed at once."""


class AdapterAddition:
    """Adds the products of one layer's adapters; see `add_adapters_twin`. Inputs and outputs of
    every projection divide by 16. The slab's numbers are float32: to widen them as they are read
    takes longer than to read twice as many bytes."""

    def __init__(self, slab: Slab, layer: SlabLayer) -> None:
        assert slab.numbers.dtype == torch.float32
        self._slab = slab
        self._layer = layer
        self._parts = torch.tensor(layer.parts)

    def begin(self, x: torch.Tensor, slots: torch.Tensor) -> None:
        """Does nothing: the layer's product takes all cores."""

    def finish(self, x: torch.Tensor, y: torch.Tensor, begun: None, slots: torch.Tensor) -> None:
        """Adds to y [T, N] what x [T, K] makes with adapters in slots, int32 [T]."""
        slab = self._slab
        layer = self._layer
        assert x.is_contiguous()
        assert y.is_contiguous()
        shrunk = x.new_empty(len(x), MAX_RANK)
        KERNEL(
            x.dtype,
            len(x),
            len(x) * RANK_UNIT * layer.num_inputs,
            *(x.data_ptr(), y.data_ptr(), shrunk.data_ptr(), slots.data_ptr()),
            *(slab.numbers.data_ptr(), slab.num_ranks.data_ptr(), slab.factors.data_ptr()),
            *(self._parts.data_ptr(), len(layer.parts), layer.num_inputs, layer.num_outputs),
            *(layer.first, slab.numbers.shape[1], layer.column, slab.factors.shape[1]),
        )


class RowAdditions:
    """Operations of a platform for adapters; see `AdapterPlatform`."""

    def adapter_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def plan_adapters(self, slots: torch.Tensor, slab: Slab) -> torch.Tensor:
        return slots

    def adapter_addition(self, slab: Slab, layer: SlabLayer) -> AdapterAddition:
        return AdapterAddition(slab, layer)


@njit
def _shrink(p_x: int, p_a: int, p_shrunk: int, sizes: Any, element: Any) -> None:
    """x [K] times A [r, K], whose rows lie `stride` bytes apart."""
    num_inputs, stride, rank = sizes
    size = size_of(element)
    for j in range(0, rank, _TOGETHER):
        p_0 = p_a + j * stride
        p_1 = p_0 + stride
        p_2 = p_1 + stride
        p_3 = p_2 + stride
        total_0 = total_1 = total_2 = total_3 = F32(0)
        for begin in range(0, num_inputs, PIECE):
            sum_0 = sum_1 = sum_2 = sum_3 = splat(F32(0))
            for k in range(begin, min(begin + PIECE, num_inputs), NUM_LANES):
                x = load(p_x + k * size, element)
                sum_0 = fma(x, load(p_0 + 4 * k, F32_ELEMENT), sum_0)
                sum_1 = fma(x, load(p_1 + 4 * k, F32_ELEMENT), sum_1)
                sum_2 = fma(x, load(p_2 + 4 * k, F32_ELEMENT), sum_2)
                sum_3 = fma(x, load(p_3 + 4 * k, F32_ELEMENT), sum_3)
            total_0 += sum_of(sum_0)
            total_1 += sum_of(sum_1)
            total_2 += sum_of(sum_2)
            total_3 += sum_of(sum_3)
        p_out = p_shrunk + j * size
        put(p_out, total_0, element)
        put(p_out + size, total_1, element)
        put(p_out + 2 * size, total_2, element)
        put(p_out + 3 * size, total_3, element)


@njit
def _add(p_y: int, delta: Any, factor: Any, element: Any) -> None:
    store(p_y, add(load(p_y, element), mul(delta, factor)), element)


@njit
def _expand(p_shrunk: int, p_b: int, p_y: int, sizes: Any, factor: Any, element: Any) -> None:
    """Adds the factor times shrunk [r] times Bᵀ [r, N], whose rows lie `stride` bytes apart, to
    y [N]."""
    num_outputs, stride, rank = sizes
    size = size_of(element)
    step = NUM_LANES * size
    n = 0
    while n + _TOGETHER * NUM_LANES <= num_outputs:
        at = n * size
        sum_0 = sum_1 = sum_2 = sum_3 = splat(F32(0))
        for j in range(rank):
            shrunk = splat(number_at(p_shrunk + j * size, element))
            p_row = p_b + j * stride + 4 * n
            sum_0 = fma(shrunk, load(p_row, F32_ELEMENT), sum_0)
            sum_1 = fma(shrunk, load(p_row + 4 * NUM_LANES, F32_ELEMENT), sum_1)
            sum_2 = fma(shrunk, load(p_row + 8 * NUM_LANES, F32_ELEMENT), sum_2)
            sum_3 = fma(shrunk, load(p_row + 12 * NUM_LANES, F32_ELEMENT), sum_3)
        _add(p_y + at, sum_0, factor, element)
        _add(p_y + at + step, sum_1, factor, element)
        _add(p_y + at + 2 * step, sum_2, factor, element)
        _add(p_y + at + 3 * step, sum_3, factor, element)
        n += _TOGETHER * NUM_LANES
    while n < num_outputs:
        total = splat(F32(0))
        for j in range(rank):
            shrunk = splat(number_at(p_shrunk + j * size, element))
            total = fma(shrunk, load(p_b + j * stride + 4 * n, F32_ELEMENT), total)
        _add(p_y + n * size, total, factor, element)
        n += NUM_LANES


@njit
def _add_to_row(arguments: int, i: int, slot: int, element: Any) -> None:
    size = size_of(element)
    num_parts, num_inputs = argument(arguments, 8), argument(arguments, 9)
    stride = argument(arguments, 12) * 4
    p_x = argument(arguments, 0) + i * num_inputs * size
    p_y = argument(arguments, 1) + i * argument(arguments, 10) * size
    p_shrunk = argument(arguments, 2) + i * MAX_RANK * size
    rank = int32_at(argument(arguments, 5) + 4 * slot)
    p_a = argument(arguments, 4) + slot * RANK_UNIT * stride + argument(arguments, 11) * 4
    p_b = p_a + num_parts * num_inputs * 4
    first_factor = slot * argument(arguments, 14) + argument(arguments, 13)
    p_factors = argument(arguments, 6) + 4 * first_factor
    for part in range(num_parts):
        num_outputs = int64_at(argument(arguments, 7) + 8 * part)
        factor = float32_at(p_factors + 4 * part)
        if factor != F32(0):
            _shrink(p_x, p_a, p_shrunk, (num_inputs, stride, rank), element)
            _expand(p_shrunk, p_b, p_y, (num_outputs, stride, rank), splat(factor), element)
        p_a += num_inputs * 4
        p_b += num_outputs * 4
        p_y += num_outputs * size


def _rows(element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            slot = int32_at(argument(arguments, 3) + 4 * i)
            if slot >= 0:
                _add_to_row(arguments, i, slot, element)

    return work


KERNEL = Kernel(_rows(F32_ELEMENT), _rows(BF16_ELEMENT))
