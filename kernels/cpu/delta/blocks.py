"""The delta rule over a block of tokens, on a CPU."""

from __future__ import annotations

from typing import Any

from numba import njit

from ..compiler.compiled import argument
from ..compiler.scalars import float32_at, put
from ..compiler.simd import add, fma, load, mul, splat, store, sub, sum_of
from ..compiler.simd_math import exp
from ..compiler.simd_types import F32, F32_ELEMENT, NUM_LANES
from ..states import rows
from . import places
from .places import WIDTH
from .scratch import at_decays, at_key_weights, at_mixed, at_query_weights, at_sums


@njit
def multiply_keys(arguments: int, p_scratch: int, p_keys: int, at: int) -> None:
    """Writes the products of the token's key and query with the keys up to its own."""
    key_dim = argument(arguments, places.KEY_DIM)
    p_query = at_mixed(arguments, p_scratch)
    p_key = p_keys + 4 * at * key_dim
    for j in range(at + 1):
        of_key = splat(F32(0))
        of_query = splat(F32(0))
        p = p_keys + 4 * j * key_dim
        for d in range(0, key_dim, NUM_LANES):
            other = load(p + 4 * d, F32_ELEMENT)
            of_key = fma(load(p_key + 4 * d, F32_ELEMENT), other, of_key)
            of_query = fma(load(p_query + 4 * d, F32_ELEMENT), other, of_query)
        put(at_key_weights(arguments, p_scratch) + 4 * j, sum_of(of_key), F32_ELEMENT)
        put(at_query_weights(arguments, p_scratch) + 4 * j, sum_of(of_query), F32_ELEMENT)


@njit
def solve(
    arguments: int,
    p_scratch: int,
    p_pieces: int,
    p_keys: int,
    p_solved: int,
    own_share: Any,
    value: int,
    at: int,
) -> None:
    """Writes the token's solved values, and its output in the place of its mixed values.
    `p_pieces`: addresses of the pieces of the state at the border; 0: there is none."""
    key_dim = argument(arguments, places.KEY_DIM)
    value_dim = argument(arguments, places.VALUE_DIM)
    columns = argument(arguments, places.COLUMNS)
    p_query = at_mixed(arguments, p_scratch)
    p_key = p_keys + 4 * at * key_dim
    p_values = p_query + 4 * (2 * key_dim + value * value_dim)
    p_rows = p_solved + 4 * value * argument(arguments, places.BLOCK_SIZE) * value_dim
    p_sum = at_sums(arguments, p_scratch) + 4 * value * argument(arguments, places.BLOCK_SIZE)
    own = float32_at(p_sum + 4 * at)
    share = splat(own_share)
    decay = exp(splat(own))
    p_decays = at_decays(arguments, p_scratch)
    for j in range(0, at, NUM_LANES):
        store(p_decays + 4 * j, exp(sub(splat(own), load(p_sum + 4 * j, F32_ELEMENT))), F32_ELEMENT)
    p_key_weights = at_key_weights(arguments, p_scratch)
    p_query_weights = at_query_weights(arguments, p_scratch)
    zero = splat(F32(0))
    for c in range(0, value_dim, WIDTH):
        k_0 = k_1 = k_2 = k_3 = q_0 = q_1 = q_2 = q_3 = zero
        if p_pieces:
            p = rows.column_of(p_pieces, value * value_dim + c, columns)
            for d in range(0, key_dim, 2):
                key = splat(float32_at(p_key + 4 * d))
                query = splat(float32_at(p_query + 4 * d))
                s_0 = load(p, F32_ELEMENT)
                s_1 = load(p + 4 * NUM_LANES, F32_ELEMENT)
                k_0 = fma(key, s_0, k_0)
                k_1 = fma(key, s_1, k_1)
                q_0 = fma(query, s_0, q_0)
                q_1 = fma(query, s_1, q_1)
                p += 4 * columns
                key = splat(float32_at(p_key + 4 * d + 4))
                query = splat(float32_at(p_query + 4 * d + 4))
                s_0 = load(p, F32_ELEMENT)
                s_1 = load(p + 4 * NUM_LANES, F32_ELEMENT)
                k_2 = fma(key, s_0, k_2)
                k_3 = fma(key, s_1, k_3)
                q_2 = fma(query, s_0, q_2)
                q_3 = fma(query, s_1, q_3)
                p += 4 * columns
        k_0 = mul(decay, add(k_0, k_2))
        k_1 = mul(decay, add(k_1, k_3))
        q_0 = mul(decay, add(q_0, q_2))
        q_1 = mul(decay, add(q_1, q_3))
        p = p_rows + 4 * c
        for j in range(at):
            factor = float32_at(p_decays + 4 * j)
            key = splat(factor * float32_at(p_key_weights + 4 * j))
            query = splat(factor * float32_at(p_query_weights + 4 * j))
            s_0 = load(p, F32_ELEMENT)
            s_1 = load(p + 4 * NUM_LANES, F32_ELEMENT)
            k_0 = fma(key, s_0, k_0)
            k_1 = fma(key, s_1, k_1)
            q_0 = fma(query, s_0, q_0)
            q_1 = fma(query, s_1, q_1)
            p += 4 * value_dim
        k_0 = mul(share, sub(load(p_values + 4 * c, F32_ELEMENT), k_0))
        k_1 = mul(share, sub(load(p_values + 4 * (c + NUM_LANES), F32_ELEMENT), k_1))
        store(p, k_0, F32_ELEMENT)
        store(p + 4 * NUM_LANES, k_1, F32_ELEMENT)
        query = splat(float32_at(p_query_weights + 4 * at))
        store(p_values + 4 * c, fma(query, k_0, q_0), F32_ELEMENT)
        store(p_values + 4 * (c + NUM_LANES), fma(query, k_1, q_1), F32_ELEMENT)


@njit
def advance(
    arguments: int, p_scratch: int, p_pieces: int, p_keys: int, p_solved: int, p_next: int
) -> None:
    """Writes the state at the next border to pieces whose addresses are at `p_next`. It may lie
    where the last one's does."""
    columns = argument(arguments, places.COLUMNS)
    key_dim = argument(arguments, places.KEY_DIM)
    value_dim = argument(arguments, places.VALUE_DIM)
    block_size = argument(arguments, places.BLOCK_SIZE)
    p_decays = at_decays(arguments, p_scratch)
    for value in range(argument(arguments, places.NUM_VALUES)):
        p_sum = at_sums(arguments, p_scratch) + 4 * value * block_size
        whole = float32_at(p_sum + 4 * (block_size - 1))
        for j in range(0, block_size, NUM_LANES):
            left = sub(splat(whole), load(p_sum + 4 * j, F32_ELEMENT))
            store(p_decays + 4 * j, exp(left), F32_ELEMENT)
        decay = exp(splat(whole))
        p_rows = p_solved + 4 * value * block_size * value_dim
        for c in range(0, value_dim, WIDTH):
            column = value * value_dim + c
            p_from = rows.column_of(p_pieces, column, columns) if p_pieces else 0
            p_to = rows.column_of(p_next, column, columns)
            for d in range(key_dim):
                at = 4 * d * columns
                s_0 = s_1 = splat(F32(0))
                if p_from:
                    s_0 = mul(decay, load(p_from + at, F32_ELEMENT))
                    s_1 = mul(decay, load(p_from + at + 4 * NUM_LANES, F32_ELEMENT))
                p = p_rows + 4 * c
                for j in range(block_size):
                    factor = float32_at(p_decays + 4 * j)
                    key = splat(factor * float32_at(p_keys + 4 * (j * key_dim + d)))
                    s_0 = fma(key, load(p, F32_ELEMENT), s_0)
                    s_1 = fma(key, load(p + 4 * NUM_LANES, F32_ELEMENT), s_1)
                    p += 4 * value_dim
                store(p_to + at, s_0, F32_ELEMENT)
                store(p_to + at + 4 * NUM_LANES, s_1, F32_ELEMENT)
