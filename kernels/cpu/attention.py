"""Attention over a CPU's paged cache (laid out as `qk_norm_rope_store_kv` says), prompts and
decoding alike.

Four rows of queries that share a key head meet sixteen keys at once. A row sees its keys in the
order of positions, `CHUNK` of them to a step of the running softmax, whatever rows are beside it: a
position's result has the same bits decoded, as part of a chunk and in a whole prompt. With a
sliding window, keys before it are neither read nor weighed. Twin:
`kernels.attention.prefill_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import ArrayLike

from .compiler.compiled import Kernel, address_of, argument, float_bits, items
from .compiler.scalars import float32_at, int32_at, put, size_of
from .compiler.simd import (
    add,
    div,
    fma,
    highest_of,
    keep_first,
    load,
    maximum,
    mul,
    splat,
    store,
    sub,
    sum_of,
)
from .compiler.simd_math import exp, tanh
from .compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from .qk_norm_rope_store_kv import MAX_HEAD_DIM

ROWS = 4
CHUNK = 256
HIDDEN = -1e30
"""Score of a key that a row does not see; finite, so that differences of scores are numbers."""
_NOTHING = -1e29
"""Highest score of a row that has seen no key yet: far above `HIDDEN`, so that hidden keys weigh
exactly zero."""
NUM_COLUMNS = 5
"""Numbers of a tile in `AttentionPlan.tiles`."""
_SCORES_SIZE = ROWS * CHUNK * 4
_ROWS_SIZE = ROWS * MAX_HEAD_DIM * 4
_SCRATCH = 2 * ROWS * MAX_HEAD_DIM + ROWS * CHUNK + 2 * ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Rows of a batch in tiles of `ROWS`; the same for every layer."""

    block_tables: torch.Tensor
    """int32 [R, blocks], contiguous"""
    tiles: np.ndarray[Any, np.dtype[np.int32]]
    """int [tiles, 5]: first token of the request, its position, the request's rows (tokens x
    group), the tile's first row, the request."""
    num_keys: int
    """Number of keys that all rows read, a measure of the work."""
    addresses: tuple[int, int]
    """Addresses of block tables and tiles. To ask numpy for one takes a microsecond, in every
    layer."""
    windowed: AttentionPlan | None = None
    """Plan of layers with a window, where their key heads have another number of query heads."""


def plan_attention(
    starts: ArrayLike,
    counts: ArrayLike,
    block_tables: torch.Tensor,
    group: int,
    windowed: AttentionPlan | None = None,
) -> AttentionPlan:
    """Plan for requests that compute positions starts[i] … starts[i] + counts[i] − 1; `group` is
    the number of query heads of a key head; block_tables int32 [R, blocks]; windowed as in
    `AttentionPlan`."""
    starts_ = np.asarray(starts, np.int64)
    counts_ = np.asarray(counts, np.int64)
    num_rows = counts_ * group
    num_tiles = -(-num_rows // ROWS)
    ends = num_tiles.cumsum()
    columns = (
        counts_.cumsum() - counts_,
        starts_,
        num_rows,
        ends - num_tiles,
        np.arange(len(counts_)),
    )
    tiles = np.repeat(np.stack(columns, 1), num_tiles, axis=0)
    tiles[:, 3] = (np.arange(len(tiles)) - tiles[:, 3]) * ROWS
    tables = block_tables.contiguous()
    rows = tiles.astype(np.int32)
    return AttentionPlan(
        block_tables=tables,
        tiles=rows,
        num_keys=int((num_rows * (starts_ + counts_)).sum()),
        addresses=(tables.data_ptr(), rows.ctypes.data),
        windowed=windowed,
    )


def attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [T, Hq, D], contiguous, over kv_cache [2, num_blocks, Hk, block_size, D] of
    q's dtype, in which the heads of a block lie together; block_size and D divide by 16. Returns
    [T, Hq, D]. A position sees the last `window` keys, its own included; 0: all up to its own;
    a negative one: those of its chunk, where sequences are cut into chunks of −window positions.
    Scores are capped by tanh to `softcap`; 0: they are not. Sinks float32 [Hq] are scores of keys
    whose values are zeros. Keys and values that a position does not see may hold any finite
    numbers."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert q.is_contiguous()
    side, block, *within = kv_cache.stride()
    assert within == [block_size * head_dim, head_dim, 1]
    assert block_size % NUM_LANES == head_dim % NUM_LANES == 0
    assert head_dim <= MAX_HEAD_DIM
    out = torch.empty_like(q)
    sizes = (
        plan.block_tables.shape[1],
        num_kv_heads,
        q.shape[1] // num_kv_heads,
        head_dim,
        block_size,
    )
    KERNEL(
        q.dtype,
        len(plan.tiles) * num_kv_heads,
        plan.num_keys * num_kv_heads * head_dim,
        *(q.data_ptr(), kv_cache.data_ptr(), out.data_ptr()),
        *plan.addresses,
        *sizes,
        *(side, block),
        float_bits(scale),
        window,
        float_bits(softcap),
        1 if softcap else 0,
        0 if sinks is None else sinks.data_ptr(),
    )
    return out


@njit
def _tile(arguments: int, i: int, p_scratch: int, element: Any) -> None:
    num_kv_heads = argument(arguments, 6)
    group = argument(arguments, 7)
    head_dim = argument(arguments, 8)
    head = i % num_kv_heads
    p_tile = argument(arguments, 4) + i // num_kv_heads * NUM_COLUMNS * 4
    first_token = int32_at(p_tile)
    start = int32_at(p_tile + 4)
    num_rows = int32_at(p_tile + 8)
    first = int32_at(p_tile + 12)
    last = min(int32_at(p_tile + 12) + ROWS, num_rows) - 1
    p_table = argument(arguments, 3) + int32_at(p_tile + 16) * argument(arguments, 5) * 4
    p_q = p_scratch
    p_out = p_scratch + _ROWS_SIZE
    p_scores = p_scratch + 2 * _ROWS_SIZE
    scale = splat(float32_at(address_of(arguments, 12)))
    for j in range(ROWS):
        # Where there are fewer rows, the last is computed again and thrown away.
        row = min(first + j, last)
        p_row = argument(arguments, 0) + _row(
            first_token, row, head, num_kv_heads, group
        ) * head_dim * size_of(element)
        for d in range(0, head_dim, NUM_LANES):
            store(
                p_q + (j * head_dim + d) * 4,
                mul(load(p_row + d * size_of(element), element), scale),
                F32_ELEMENT,
            )
            store(p_out + (j * head_dim + d) * 4, splat(F32(0)), F32_ELEMENT)
        begin_row(_state_of(p_scratch, j))
    num_keys = start + last // group + 1
    window = argument(arguments, 13)
    # First key that any row of the tile attends to. Chunks are aligned as without a window: skipped
    # keys have weight zero, so a row's bits do not depend on other rows.
    oldest = max(_num_hidden(start + first // group + 1, window), 0)
    for key in range(oldest // CHUNK * CHUNK, num_keys, CHUNK):
        begin = max(oldest - key, 0) // NUM_LANES * NUM_LANES
        count = min(CHUNK, num_keys - key)
        # How many of the chunk's keys each row sees.
        seen = (
            start + first // group + 1 - key,
            start + min(first + 1, last) // group + 1 - key,
            start + min(first + 2, last) // group + 1 - key,
            start + last // group + 1 - key,
        )
        highest = _score(arguments, p_table, head, key, begin, count, seen, p_q, p_scores, element)
        for j in range(ROWS):
            weigh(
                p_scores + j * CHUNK * 4,
                p_out + j * head_dim * 4,
                _state_of(p_scratch, j),
                highest[j],
                begin,
                count,
                head_dim,
            )
        _add_values(arguments, p_table, head, key, begin, count, p_scores, p_out, element)
    for j in range(last - first + 1):
        p_row = argument(arguments, 2)
        p_row += (
            _row(first_token, first + j, head, num_kv_heads, group) * head_dim * size_of(element)
        )
        total = splat(_whole_total(arguments, p_scratch, j, head * group + (first + j) % group))
        for d in range(0, head_dim, NUM_LANES):
            x = div(load(p_out + (j * head_dim + d) * 4, F32_ELEMENT), total)
            store(p_row + d * size_of(element), x, element)


@njit
def _num_hidden(num_keys: int, window: int) -> int:
    """Number of the first keys that the last of so many positions does not see, or less than one;
    window as in `attention`."""
    if window < 0:
        return (num_keys - 1) // -window * -window
    return num_keys - window if window else 0


@njit
def _row(first_token: int, row: int, head: int, num_kv_heads: int, group: int) -> int:
    """Row of q and out, seen as [T x Hq, D]."""
    return ((first_token + row // group) * num_kv_heads + head) * group + row % group


@njit
def _head_of(arguments: int, p_table: int, head: int, key: int, is_value: int) -> Any:
    """Index of the first element of the head in the key's block."""
    head_dim = argument(arguments, 8)
    block_size = argument(arguments, 9)
    block = int32_at(p_table + key // block_size * 4)
    first = is_value * argument(arguments, 10) + block * argument(arguments, 11)
    return first + head * block_size * head_dim


@njit
def _score(
    arguments: int,
    p_table: int,
    head: int,
    key: int,
    begin: int,
    count: int,
    seen: tuple[int, int, int, int],
    p_q: int,
    p_scores: int,
    element: Any,
) -> Any:
    """Writes the scores [ROWS, CHUNK] of a chunk's keys from `begin` to `count`; returns the
    highest of each row."""
    head_dim = argument(arguments, 8)
    block_size = argument(arguments, 9)
    window = argument(arguments, 13)
    # How many of the chunk's keys are hidden from each row since they are too old.
    behind = (
        _num_hidden(key + seen[0], window) - key,
        _num_hidden(key + seen[1], window) - key,
        _num_hidden(key + seen[2], window) - key,
        _num_hidden(key + seen[3], window) - key,
    )
    width = head_dim * 4
    is_capped = argument(arguments, 15)
    softcap = splat(float32_at(address_of(arguments, 14)))
    hidden = splat(F32(HIDDEN))
    zero = splat(F32(0))
    highest_0 = highest_1 = highest_2 = highest_3 = hidden
    for at in range(begin, count, NUM_LANES):
        first = _head_of(arguments, p_table, head, key + at, 0)
        p_k = argument(arguments, 1) + (first + (key + at) % block_size) * size_of(element)
        # Two sums a row, one of even and one of odd dimensions: a sum has to wait for itself.
        a_0 = a_1 = a_2 = a_3 = b_0 = b_1 = b_2 = b_3 = zero
        for d in range(0, head_dim, 2):
            k = load(p_k + d * block_size * size_of(element), element)
            p = p_q + d * 4
            a_0 = fma(splat(float32_at(p)), k, a_0)
            a_1 = fma(splat(float32_at(p + width)), k, a_1)
            a_2 = fma(splat(float32_at(p + 2 * width)), k, a_2)
            a_3 = fma(splat(float32_at(p + 3 * width)), k, a_3)
            k = load(p_k + (d + 1) * block_size * size_of(element), element)
            p += 4
            b_0 = fma(splat(float32_at(p)), k, b_0)
            b_1 = fma(splat(float32_at(p + width)), k, b_1)
            b_2 = fma(splat(float32_at(p + 2 * width)), k, b_2)
            b_3 = fma(splat(float32_at(p + 3 * width)), k, b_3)
        a_0 = add(a_0, b_0)
        a_1 = add(a_1, b_1)
        a_2 = add(a_2, b_2)
        a_3 = add(a_3, b_3)
        if is_capped:
            a_0 = mul(tanh(div(a_0, softcap)), softcap)
            a_1 = mul(tanh(div(a_1, softcap)), softcap)
            a_2 = mul(tanh(div(a_2, softcap)), softcap)
            a_3 = mul(tanh(div(a_3, softcap)), softcap)
        a_0 = keep_first(a_0, seen[0] - at, hidden)
        a_1 = keep_first(a_1, seen[1] - at, hidden)
        a_2 = keep_first(a_2, seen[2] - at, hidden)
        a_3 = keep_first(a_3, seen[3] - at, hidden)
        if at < behind[3]:
            a_0 = keep_first(hidden, behind[0] - at, a_0)
            a_1 = keep_first(hidden, behind[1] - at, a_1)
            a_2 = keep_first(hidden, behind[2] - at, a_2)
            a_3 = keep_first(hidden, behind[3] - at, a_3)
        p = p_scores + at * 4
        store(p, a_0, F32_ELEMENT)
        store(p + CHUNK * 4, a_1, F32_ELEMENT)
        store(p + CHUNK * 8, a_2, F32_ELEMENT)
        store(p + CHUNK * 12, a_3, F32_ELEMENT)
        highest_0 = maximum(highest_0, a_0)
        highest_1 = maximum(highest_1, a_1)
        highest_2 = maximum(highest_2, a_2)
        highest_3 = maximum(highest_3, a_3)
    return (
        highest_of(highest_0),
        highest_of(highest_1),
        highest_of(highest_2),
        highest_of(highest_3),
    )


@njit
def _add_values(
    arguments: int,
    p_table: int,
    head: int,
    key: int,
    begin: int,
    count: int,
    p_weights: int,
    p_out: int,
    element: Any,
) -> None:
    head_dim = argument(arguments, 8)
    block_size = argument(arguments, 9)
    width = head_dim * 4
    stride = head_dim * size_of(element)
    zero = splat(F32(0))
    for d in range(0, head_dim, NUM_LANES):
        p_o = p_out + d * 4
        a_0 = load(p_o, F32_ELEMENT)
        a_1 = load(p_o + width, F32_ELEMENT)
        a_2 = load(p_o + 2 * width, F32_ELEMENT)
        a_3 = load(p_o + 3 * width, F32_ELEMENT)
        b_0 = b_1 = b_2 = b_3 = zero
        for at in range(begin, count, NUM_LANES):
            first = _head_of(arguments, p_table, head, key + at, 1)
            p_v = argument(arguments, 1) + (first + d) * size_of(element)
            p_v += (key + at) % block_size * stride
            for lane in range(0, NUM_LANES, 2):
                v = load(p_v + lane * stride, element)
                p = p_weights + (at + lane) * 4
                a_0 = fma(splat(float32_at(p)), v, a_0)
                a_1 = fma(splat(float32_at(p + CHUNK * 4)), v, a_1)
                a_2 = fma(splat(float32_at(p + CHUNK * 8)), v, a_2)
                a_3 = fma(splat(float32_at(p + CHUNK * 12)), v, a_3)
                v = load(p_v + (lane + 1) * stride, element)
                p += 4
                b_0 = fma(splat(float32_at(p)), v, b_0)
                b_1 = fma(splat(float32_at(p + CHUNK * 4)), v, b_1)
                b_2 = fma(splat(float32_at(p + CHUNK * 8)), v, b_2)
                b_3 = fma(splat(float32_at(p + CHUNK * 12)), v, b_3)
        store(p_o, add(a_0, b_0), F32_ELEMENT)
        store(p_o + width, add(a_1, b_1), F32_ELEMENT)
        store(p_o + 2 * width, add(a_2, b_2), F32_ELEMENT)
        store(p_o + 3 * width, add(a_3, b_3), F32_ELEMENT)


@njit
def begin_row(p_state: int) -> None:
    """Puts the highest score and the sum of weights of a row without keys at an address, 8
    bytes."""
    put_state(p_state, F32(_NOTHING), F32(0))


@njit
def weigh(
    p_scores: int, p_out: int, p_state: int, highest: Any, begin: int, count: int, width: int
) -> None:
    """Turns the scores of a row, float32 from `begin` to `count`, into weights; scales the row's
    result so far, float32 [width], to the new highest score. `begin` is a multiple of `NUM_LANES`;
    scores behind `count` are `HIDDEN` up to the next one."""
    before = highest_so_far(p_state)
    highest = max(before, highest)
    total = splat(F32(0))
    for at in range(begin, count, NUM_LANES):
        weight = exp(sub(load(p_scores + at * 4, F32_ELEMENT), splat(highest)))
        store(p_scores + at * 4, weight, F32_ELEMENT)
        total = add(total, weight)
    scale = exp(splat(before - highest))
    for d in range(0, width, NUM_LANES):
        store(p_out + d * 4, mul(load(p_out + d * 4, F32_ELEMENT), scale), F32_ELEMENT)
    put_state(p_state, highest, total_of(p_state) * highest_of(scale) + sum_of(total))


@njit
def put_state(p_state: int, highest: Any, total: Any) -> None:
    put(p_state, highest, F32_ELEMENT)
    put(p_state + 4, total, F32_ELEMENT)


@njit
def highest_so_far(p_state: int) -> Any:
    return float32_at(p_state)


@njit
def total_of(p_state: int) -> Any:
    """Sum of a row's weights."""
    return float32_at(p_state + 4)


@njit
def _state_of(p_scratch: int, j: int) -> int:
    """Address of the softmax of a row."""
    return p_scratch + 2 * _ROWS_SIZE + _SCORES_SIZE + j * 8


@njit
def _whole_total(arguments: int, p_scratch: int, j: int, query_head: int) -> Any:
    """Sum of a row's weights with that of its head's sink, which is added last, so that it does not
    depend on the order of keys."""
    p_sinks = argument(arguments, 16)
    p_state = _state_of(p_scratch, j)
    total = total_of(p_state)
    if p_sinks:
        above = float32_at(p_sinks + query_head * 4) - highest_so_far(p_state)
        total = total + highest_of(exp(splat(above)))
    return total


def _tiles(element: Any) -> Any:
    def work(arguments: int) -> None:
        scratch = np.empty(_SCRATCH, np.float32)
        for i in items(arguments):
            _tile(arguments, i, scratch.ctypes.data, element)

    return work


KERNEL = Kernel(_tiles(F32_ELEMENT), _tiles(BF16_ELEMENT))
