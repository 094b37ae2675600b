"""Rows of tokens by expert, on a CPU: which rows each expert has, copies of them side by side, and
the sum of each token's experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from numba import njit

from ...gemm.tree_sum import tree_sum
from ..compiler.compiled import Kernel, argument, items
from ..compiler.scalars import float32_at, int32_at, int64_at, put_int64, size_of
from ..compiler.simd import add, load, mul, splat, store
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES

_INT = 4
_LONG = 8
"""Bytes of indices."""


@dataclass(frozen=True, slots=True)
class RowsByExpert:
    """The k rows of each of T tokens, sorted by expert; those of one expert in order of tokens."""

    starts: torch.Tensor
    """int64 [E + 1]: places of an expert's first row and of the one after its last."""
    chosen: torch.Tensor
    """int64 [min(E, T k)]: experts that have rows, then −1."""
    tokens: torch.Tensor
    """int64 [T k]: the token of a place."""
    places: torch.Tensor
    """int64 [T k]: the place of a token's rows in routing order; −1 of a row that has no expert
    here."""

    def of_experts_here(self) -> RowsByExpert:
        """The same rows without those of other ranks' experts, which come last."""
        return replace(self, tokens=self.tokens[: int(self.starts[-1])])


def sort_by_expert(experts: torch.Tensor, num_experts: int) -> RowsByExpert:
    """experts int32 [T, k], contiguous, each below `num_experts`, or −1: it is not here."""
    assert experts.is_contiguous()
    num_rows = experts.numel()
    starts = torch.empty(num_experts + 1, dtype=torch.int64)
    chosen = torch.empty(min(num_experts, num_rows), dtype=torch.int64)
    tokens, places = (torch.empty(num_rows, dtype=torch.int64) for _ in range(2))
    SORT(
        torch.float32,
        1,
        num_rows,
        *(experts.data_ptr(), starts.data_ptr(), tokens.data_ptr(), places.data_ptr()),
        *(num_rows, experts.shape[1], num_experts, chosen.data_ptr(), len(chosen)),
    )
    return RowsByExpert(starts, chosen, tokens, places)


def count_rows(experts: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds the number of rows of each expert to counts int64 [E]: experts int32 [T, k],
    contiguous."""
    assert experts.is_contiguous()
    assert counts.is_contiguous()
    num_rows = experts.numel()
    COUNT(torch.float32, 1, num_rows, experts.data_ptr(), counts.data_ptr(), num_rows)


def rows_of_tokens(x: torch.Tensor, rows: RowsByExpert) -> torch.Tensor:
    """x [T, H], contiguous → [T k, H]: the rows of tokens, by place."""
    assert x.is_contiguous()
    out = x.new_empty(len(rows.tokens), x.shape[1])
    GATHER(
        x.dtype,
        len(out),
        out.numel(),
        *(x.data_ptr(), rows.tokens.data_ptr(), out.data_ptr(), x.shape[1]),
    )
    return out


def add_biases(
    outs: torch.Tensor, rows: RowsByExpert, experts: torch.Tensor, biases: torch.Tensor
) -> None:
    """Adds the bias of its expert to each row of outs [T k, N] by place, in outs' type: biases
    [E, N], experts int32 [T, k]."""
    assert outs.is_contiguous()
    assert experts.is_contiguous()
    assert biases.is_contiguous()
    assert biases.dtype == outs.dtype
    ADD_BIASES(
        outs.dtype,
        len(rows.places),
        outs.numel(),
        *(outs.data_ptr(), rows.places.data_ptr(), experts.data_ptr(), biases.data_ptr()),
        outs.shape[1],
    )


def combine(outs: torch.Tensor, rows: RowsByExpert, weights: torch.Tensor) -> torch.Tensor:
    """outs [T k, H] by place, weights float32 [T, k] → [T, H]: a token's rows times their weights,
    added in float32 in routing order and rounded once."""
    return _combined(COMBINE, outs, rows, weights, outs.dtype)


def combine_in_tree(
    outs: torch.Tensor,
    rows: RowsByExpert,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_leaves: int,
) -> torch.Tensor:
    """Like `combine`, → float32 [T, H]: experts of equal groups are added, and the groups in a
    tree. experts int32 [T, k], −1: its row counts for nothing."""
    num_experts = len(rows.starts) - 1
    leaves = experts.flatten() * num_leaves // num_experts
    sums = []
    for leaf in range(num_leaves):
        own = replace(rows, places=rows.places.masked_fill(leaves != leaf, -1))
        sums.append(_combined(COMBINE_WIDE, outs, own, weights, torch.float32))
    return tree_sum(sums)


def _combined(
    kernel: Kernel,
    outs: torch.Tensor,
    rows: RowsByExpert,
    weights: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    num_tokens, num_chosen = weights.shape
    assert outs.is_contiguous()
    assert weights.is_contiguous()
    out = torch.empty(num_tokens, outs.shape[1], dtype=dtype)
    kernel(
        outs.dtype,
        num_tokens,
        outs.numel(),
        *(outs.data_ptr(), rows.places.data_ptr(), weights.data_ptr(), out.data_ptr()),
        *(outs.shape[1], num_chosen),
    )
    return out


@njit
def _sort(arguments: int) -> None:
    p_experts = argument(arguments, 0)
    p_starts = argument(arguments, 1)
    p_tokens = argument(arguments, 2)
    p_places = argument(arguments, 3)
    num_rows = argument(arguments, 4)
    num_chosen = argument(arguments, 5)
    num_experts = argument(arguments, 6)
    for expert in range(num_experts + 1):
        put_int64(p_starts + expert * _LONG, 0)
    for row in range(num_rows):
        expert = int32_at(p_experts + row * _INT)
        if expert >= 0:
            p_count = p_starts + (expert + 1) * _LONG
            put_int64(p_count, int64_at(p_count) + 1)
    for expert in range(num_experts):
        p_start = p_starts + expert * _LONG
        put_int64(p_start + _LONG, int64_at(p_start + _LONG) + int64_at(p_start))
    # While rows are placed, an expert's start is the place of its next row.
    for row in range(num_rows):
        expert = int32_at(p_experts + row * _INT)
        place = -1
        if expert >= 0:
            p_next = p_starts + expert * _LONG
            place = int64_at(p_next)
            put_int64(p_next, place + 1)
            put_int64(p_tokens + place * _LONG, row // num_chosen)
        put_int64(p_places + row * _LONG, place)
    for expert in range(num_experts, 0, -1):
        put_int64(p_starts + expert * _LONG, int64_at(p_starts + (expert - 1) * _LONG))
    put_int64(p_starts, 0)
    _list_chosen(arguments)


@njit
def _list_chosen(arguments: int) -> None:
    p_starts = argument(arguments, 1)
    p_chosen = argument(arguments, 7)
    num_chosen = 0
    for expert in range(argument(arguments, 6)):
        p_start = p_starts + expert * _LONG
        if int64_at(p_start + _LONG) > int64_at(p_start):
            put_int64(p_chosen + num_chosen * _LONG, expert)
            num_chosen += 1
    for i in range(num_chosen, argument(arguments, 8)):
        put_int64(p_chosen + i * _LONG, -1)


@njit
def _count(arguments: int) -> None:
    p_experts = argument(arguments, 0)
    p_counts = argument(arguments, 1)
    for row in range(argument(arguments, 2)):
        p_count = p_counts + int32_at(p_experts + row * _INT) * _LONG
        put_int64(p_count, int64_at(p_count) + 1)


def _counting(arguments: int) -> None:
    for _ in items(arguments):
        _count(arguments)


def _sorting(arguments: int) -> None:
    for _ in items(arguments):
        _sort(arguments)


@njit
def _gather_row(arguments: int, row: int, element: Any) -> None:
    size = argument(arguments, 3) * size_of(element)
    p_x = argument(arguments, 0) + int64_at(argument(arguments, 1) + row * _LONG) * size
    p_out = argument(arguments, 2) + row * size
    for at in range(0, size, NUM_LANES * size_of(element)):
        store(p_out + at, load(p_x + at, element), element)


@njit
def _add_bias(arguments: int, pair: int, element: Any) -> None:
    size = argument(arguments, 4) * size_of(element)
    place = int64_at(argument(arguments, 1) + pair * _LONG)
    if place < 0:
        return
    p_out = argument(arguments, 0) + place * size
    p_bias = argument(arguments, 3) + int32_at(argument(arguments, 2) + pair * _INT) * size
    for at in range(0, size, NUM_LANES * size_of(element)):
        store(p_out + at, add(load(p_out + at, element), load(p_bias + at, element)), element)


@njit
def _combine_row(arguments: int, row: int, element: Any, sum_element: Any) -> None:
    width = argument(arguments, 4)
    num_chosen = argument(arguments, 5)
    p_outs = argument(arguments, 0)
    p_places = argument(arguments, 1) + row * num_chosen * _LONG
    p_weights = argument(arguments, 2) + row * num_chosen * _INT
    p_out = argument(arguments, 3) + row * width * size_of(sum_element)
    for at in range(0, width, NUM_LANES):
        total = splat(F32(0))
        for i in range(num_chosen):
            place = int64_at(p_places + i * _LONG)
            if place >= 0:
                p_row = p_outs + (place * width + at) * size_of(element)
                weight = splat(float32_at(p_weights + i * _INT))
                total = add(total, mul(load(p_row, element), weight))
        store(p_out + at * size_of(sum_element), total, sum_element)


def _gathering(element: Any) -> Any:
    def work(arguments: int) -> None:
        for row in items(arguments):
            _gather_row(arguments, row, element)

    return work


def _adding(element: Any) -> Any:
    def work(arguments: int) -> None:
        for pair in items(arguments):
            _add_bias(arguments, pair, element)

    return work


def _combining(element: Any, sum_element: Any) -> Any:
    def work(arguments: int) -> None:
        for row in items(arguments):
            _combine_row(arguments, row, element, sum_element)

    return work


SORT = Kernel(_sorting, _sorting)
COUNT = Kernel(_counting, _counting)
GATHER = Kernel(_gathering(F32_ELEMENT), _gathering(BF16_ELEMENT))
ADD_BIASES = Kernel(_adding(F32_ELEMENT), _adding(BF16_ELEMENT))
COMBINE = Kernel(_combining(F32_ELEMENT, F32_ELEMENT), _combining(BF16_ELEMENT, BF16_ELEMENT))
COMBINE_WIDE = Kernel(_combining(F32_ELEMENT, F32_ELEMENT), _combining(BF16_ELEMENT, F32_ELEMENT))
"""Sums are float32."""
