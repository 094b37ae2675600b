"""Rows of heads, packed for products of tiles, in functions that numba compiles."""

from __future__ import annotations

from typing import Any

from numba import njit

from ..compiler.scalars import number_at, put, size_of
from ..compiler.simd import load, splat, store
from ..compiler.simd_types import F32, F32_ELEMENT, NUM_LANES
from .word_tiles import COLUMN_BYTES, TILE_COLUMNS, joined_halves, transpose_words


@njit
def multiple(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return (count + step - 1) // step * step


@njit
def copy_rows(
    p_from: int,
    from_bytes: int,
    count: int,
    p_to: int,
    num_rows: int,
    head_dim: int,
    element: Any,
    packed: Any,
) -> None:
    """Copies `count` rows of a head to rows of whole columns; zeros stand behind the head and in
    rows up to `num_rows`."""
    size = size_of(element)
    to_size = size_of(packed)
    padded = multiple(head_dim, TILE_COLUMNS)
    whole = head_dim // NUM_LANES * NUM_LANES
    for i in range(num_rows):
        p_row = p_to + i * padded * to_size
        p_head = p_from + i * from_bytes
        for d in range(0, padded, NUM_LANES):
            is_there = i < count and d < whole
            x = load(p_head + d * size, element) if is_there else splat(F32(0))
            store(p_row + d * to_size, x, packed)
        if i < count:
            for d in range(whole, head_dim):
                put(p_row + d * to_size, number_at(p_head + d * size, element), packed)


@njit
def pack_keys(p_rows: int, num_keys: int, padded: int, p_keys: int, packed: Any) -> None:
    """Packs rows of keys in columns of one key."""
    row_bytes = padded * size_of(packed)
    for key in range(0, num_keys, NUM_LANES):
        p_panel = p_keys + key // TILE_COLUMNS * TILE_COLUMNS * row_bytes + key % TILE_COLUMNS * 4
        for word in range(0, row_bytes // 4, NUM_LANES):
            p_words = p_rows + key * row_bytes + word * 4
            transpose_words(p_words, row_bytes, p_panel + word * COLUMN_BYTES)


@njit
def pack_values(p_rows: int, num_keys: int, padded: int, p_values: int, packed: Any) -> None:
    """Packs rows of values in columns of one dimension."""
    size = size_of(packed)
    keys_of_word = 4 // size
    for key in range(0, num_keys, keys_of_word):
        for d in range(0, padded, NUM_LANES):
            p_row = p_rows + (key * padded + d) * size
            x = load(p_row, packed)
            if keys_of_word == 2:
                x = joined_halves(x, load(p_row + padded * size, packed))
            p_panel = p_values + d // TILE_COLUMNS * TILE_COLUMNS * num_keys * size
            p_word = p_panel + key // keys_of_word * COLUMN_BYTES
            store(p_word + d % TILE_COLUMNS * 4, x, F32_ELEMENT)
