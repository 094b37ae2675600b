"""Attention of whole texts on a CPU. Twin: `kernels.attention.mutual_attention`.

An item of work is `QUERIES` queries of a head of a text, which meet `KEYS` keys to a step of the
running softmax, from the text's first key on: a text has the same bits in any batch. Keys and
values are packed once for all queries of an item: in bfloat16 where AMX multiplies it, else in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit

from ..attention import begin_row
from ..compiler.compiled import Kernel, address_of, argument, float_bits, items
from ..compiler.scalars import float32_at, int32_at, size_of
from ..compiler.simd import splat, store
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from .packed_rows import copy_rows, multiple, pack_keys, pack_values
from .score_rows import store_row, weigh_row
from .word_tiles import (
    CONFIG_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    configure_tiles,
    has_amx,
    multiply_words,
    restore_tiles,
)

QUERIES = 512
KEYS = 512
_SCORE_BYTES = (KEYS + NUM_LANES) * 4
"""Bytes from a row of scores to the next one. Rows a power of two apart would share a few lines of
the cache."""
_STATE_BYTES = 8
_TILE_BYTES = 16
"""Bytes of a row of the work list: the first row of a text in qkv, the text's tokens, the item's
first query, and the text's keys."""
_ALIGNMENT = 64


def mutual_attention(
    qkv: torch.Tensor,
    counts: Sequence[int],
    head_dim: int,
    distance_bias: torch.Tensor | None = None,
    attended: Sequence[int] = (),
) -> torch.Tensor:
    """See `mutual_attention_twin`."""
    assert qkv.is_contiguous()
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // 3 // head_dim
    out = qkv.new_empty(num_tokens, num_heads * head_dim)
    firsts = np.cumsum(counts) - counts
    texts = zip(firsts.tolist(), counts, attended or counts, strict=True)
    # Longest first, so that all threads end at about the same time.
    tiles = [
        (first, count, start, num_keys)
        for first, count, num_keys in sorted(texts, key=lambda text: -text[1])
        for start in range(0, count, QUERIES)
    ]
    work_list = np.array(tiles, np.int32)
    kernel()(
        qkv.dtype,
        len(tiles) * num_heads,
        qkv.numel() * max(counts),
        *(qkv.data_ptr(), out.data_ptr(), work_list.ctypes.data),
        *(num_heads, head_dim, float_bits(head_dim**-0.5)),
        *((0, 0) if distance_bias is None else (distance_bias.data_ptr(), distance_bias.shape[1])),
    )
    return out


@njit
def _weigh_keys(
    arguments: int,
    head: int,
    query: int,
    num_rows: int,
    key: int,
    count: int,
    inputs: tuple[int, int, int],
    sums: tuple[int, int],
    packed: Any,
) -> None:
    """Writes the weights of `count` keys from `key` on for a tile's queries from `query` on, and
    scales the tile's sums so far."""
    p_queries, p_keys, p_scores = inputs
    p_sums, p_states = sums
    padded = multiple(argument(arguments, 4), TILE_COLUMNS)
    scale = float32_at(address_of(arguments, 5))
    bias_width = argument(arguments, 7)
    num_padded = multiple(count, TILE_COLUMNS)
    row_bytes = padded * size_of(packed)
    for at in range(0, num_padded, TILE_COLUMNS):
        p_panel = p_keys + at * row_bytes
        p = p_scores + at * 4
        multiply_words(p_queries, row_bytes, p_panel, row_bytes // 4, p, _SCORE_BYTES, True, packed)
    for j in range(num_rows):
        p_row = p_scores + j * _SCORE_BYTES
        p_bias = argument(arguments, 6)
        if p_bias:
            p_bias += (head * bias_width + bias_width // 2 + key - query - j) * 4
        p_row_sums = p_sums + j * padded * 4
        p_state = p_states + j * _STATE_BYTES
        weigh_row(p_row, num_padded, count, scale, p_bias, p_row_sums, padded, p_state, packed)


@njit
def _attend(arguments: int, i: int, p_scratch: int, element: Any, packed: Any) -> None:
    num_heads = argument(arguments, 3)
    head_dim = argument(arguments, 4)
    padded = multiple(head_dim, TILE_COLUMNS)
    head = i % num_heads
    p_tile = argument(arguments, 2) + i // num_heads * _TILE_BYTES
    first = int32_at(p_tile)
    start = int32_at(p_tile + 8)
    num_queries = min(int32_at(p_tile + 4) - start, QUERIES)
    num_keys = int32_at(p_tile + 12)
    width = num_heads * head_dim * size_of(element)
    p_head = argument(arguments, 0) + first * 3 * width + head * head_dim * size_of(element)
    p_packed_keys = p_scratch
    p_packed_values = p_packed_keys + KEYS * padded * 4
    p_rows = p_packed_values + KEYS * padded * 4
    p_sums = p_rows + KEYS * padded * 4
    p_states = p_sums + QUERIES * padded * 4
    p_scores = p_states + QUERIES * _STATE_BYTES
    for j in range(num_queries):
        begin_row(p_states + j * _STATE_BYTES)
    for j in range(0, multiple(num_queries, TILE_ROWS) * padded, NUM_LANES):
        store(p_sums + j * 4, splat(F32(0)), F32_ELEMENT)
    for key in range(0, num_keys, KEYS):
        count = min(num_keys - key, KEYS)
        num_padded = multiple(count, TILE_COLUMNS)
        p_key = p_head + key * 3 * width + width
        copy_rows(p_key, 3 * width, count, p_rows, num_padded, head_dim, element, packed)
        pack_keys(p_rows, num_padded, padded, p_packed_keys, packed)
        copy_rows(p_key + width, 3 * width, count, p_rows, num_padded, head_dim, element, packed)
        pack_values(p_rows, num_padded, padded, p_packed_values, packed)
        for query in range(0, num_queries, TILE_ROWS):
            num_rows = min(num_queries - query, TILE_ROWS)
            p_query = p_head + (start + query) * 3 * width
            copy_rows(p_query, 3 * width, num_rows, p_rows, TILE_ROWS, head_dim, element, packed)
            p_tile_sums = p_sums + query * padded * 4
            inputs = (p_rows, p_packed_keys, p_scores)
            sums = (p_tile_sums, p_states + query * _STATE_BYTES)
            _weigh_keys(arguments, head, start + query, num_rows, key, count, inputs, sums, packed)
            for d in range(0, padded, TILE_COLUMNS):
                p_panel = p_packed_values + d * num_padded * size_of(packed)
                num_words = num_padded * size_of(packed) // 4
                p = p_tile_sums + d * 4
                multiply_words(
                    p_scores, _SCORE_BYTES, p_panel, num_words, p, padded * 4, False, packed
                )
    p_out = argument(arguments, 1) + (first + start) * width + head * head_dim * size_of(element)
    for j in range(num_queries):
        p_state = p_states + j * _STATE_BYTES
        store_row(p_sums + j * padded * 4, p_state, p_out + j * width, head_dim, element)


def _tiles(element: Any, packed: Any) -> Any:
    def work(arguments: int) -> None:
        padded = multiple(argument(arguments, 4), TILE_COLUMNS)
        num_bytes = (3 * KEYS + QUERIES) * padded * 4
        num_bytes += QUERIES * _STATE_BYTES + TILE_ROWS * _SCORE_BYTES
        scratch = np.empty(num_bytes + 2 * CONFIG_BYTES + _ALIGNMENT, np.uint8)
        p_config = multiple(scratch.ctypes.data, _ALIGNMENT)
        configure_tiles(p_config, packed)
        for i in items(arguments):
            _attend(arguments, i, p_config + 2 * CONFIG_BYTES, element, packed)
        restore_tiles(p_config, packed)

    return work


@cache
def kernel() -> Kernel:
    packed = BF16_ELEMENT if has_amx() else F32_ELEMENT
    return Kernel(_tiles(F32_ELEMENT, F32_ELEMENT), _tiles(BF16_ELEMENT, packed))
