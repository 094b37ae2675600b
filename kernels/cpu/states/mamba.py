"""A Mamba-2 layer between its projection and its norm, on a CPU, over states in pages. Twin:
`kernels.mamba.mamba_twin`.

A token's numbers are computed from the state at the last border and from the block's tokens before
it, in one order. So its bits do not depend on how many tokens a pass computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from ...mamba.mamba_layer import MambaLayer
from ...states.state_memory import StateMemory
from ..compiler.compiled import Kernel, argument, items
from ..compiler.scalars import float32_at
from ..compiler.simd import fma, load, mul, splat, store, sum_of
from ..compiler.simd_math import exp
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from . import mamba_places as places
from . import mamba_tokens as tokens
from . import rows


def mamba(parts: torch.Tensor, layer: MambaLayer, memory: StateMemory) -> torch.Tensor:
    """The projection [T, …] of the rows of a batch → gated outputs [T, heads · head_dim]. Reads the
    states of the rows' first blocks, appends to their tails, and writes those of their last blocks.
    Heads and states have a multiple of `NUM_LANES` numbers."""
    unit = layer.unit
    assert parts.stride(1) == 1
    assert unit.head_dim % NUM_LANES == unit.state_dim % NUM_LANES == 0
    assert unit.is_wide
    assert unit.element_size == parts.element_size()
    out = parts.new_empty(len(parts), layer.values_size)
    KERNEL(
        parts.dtype,
        len(memory.starts) * layer.num_units,
        len(parts) * layer.values_size * unit.state_dim,
        *rows.row_arguments(memory, layer.num_units),
        *(parts.data_ptr(), parts.stride(0), out.data_ptr()),
        *(layer.taps.data_ptr(), layer.bias.data_ptr(), layer.rates.data_ptr()),
        *(layer.step_biases.data_ptr(), layer.skips.data_ptr()),
        *(unit.num_heads, unit.head_dim, unit.state_dim, unit.width, unit.block_size),
        *(unit.decays_at, unit.keys_at, unit.values_at, layer.num_groups, unit.columns),
    )
    return out


@njit
def _write(
    arguments: int,
    p_scratch: int,
    p_pieces: int,
    p_block: Any,
    token: int,
    unit: int,
    at: int,
    element: Any,
) -> None:
    """Writes the outputs of a token, the `at`-th of its block, times the SiLU of its gates.
    `p_pieces`: addresses of the pieces of the state at the border; 0: there is none."""
    columns = argument(arguments, places.COLUMNS)
    _, p_keys, p_values = p_block
    head_dim = argument(arguments, places.HEAD_DIM)
    state_dim = argument(arguments, places.STATE_DIM)
    num_heads = argument(arguments, places.NUM_HEADS)
    width = num_heads * head_dim
    p_mixed = tokens.at_mixed(arguments, p_scratch)
    p_query = p_mixed + 4 * (width + state_dim)
    p_weights = tokens.at_weights(arguments, p_scratch)
    for j in range(at + 1):
        products = splat(F32(0))
        for n in range(0, state_dim, NUM_LANES):
            key = load(p_keys + 4 * (j * state_dim + n), F32_ELEMENT)
            products = fma(load(p_query + 4 * n, F32_ELEMENT), key, products)
        store(p_weights + 4 * NUM_LANES * j, splat(sum_of(products)), F32_ELEMENT)
    for head in range(num_heads):
        tokens.decay_weights(arguments, p_scratch, head, at)
        since = exp(splat(tokens.sum_at(arguments, p_scratch, head, at)))
        skip = splat(float32_at(tokens.of_head(arguments, places.SKIPS, unit, head)))
        for p in range(0, head_dim, NUM_LANES):
            column = head * head_dim + p
            out = splat(F32(0))
            if p_pieces:
                p_column = rows.column_of(p_pieces, column, columns)
                for n in range(state_dim):
                    row = load(p_column + 4 * n * columns, F32_ELEMENT)
                    out = fma(splat(float32_at(p_query + 4 * n)), row, out)
                out = mul(out, since)
            for j in range(at + 1):
                left = load(tokens.at_left(arguments, p_scratch, j), F32_ELEMENT)
                weight = mul(load(p_weights + 4 * NUM_LANES * j, F32_ELEMENT), left)
                out = fma(weight, load(p_values + 4 * (j * width + column), F32_ELEMENT), out)
            out = fma(skip, load(p_mixed + 4 * column, F32_ELEMENT), out)
            tokens.put_gated(arguments, token, unit, column, out, element)


@njit
def _advance(arguments: int, p_scratch: int, p_pieces: int, p_block: Any, p_next: int) -> None:
    """Writes the state behind a whole block to pieces whose addresses are at `p_next`; both states
    may be the same memory."""
    columns = argument(arguments, places.COLUMNS)
    _, p_keys, p_values = p_block
    head_dim = argument(arguments, places.HEAD_DIM)
    state_dim = argument(arguments, places.STATE_DIM)
    num_heads = argument(arguments, places.NUM_HEADS)
    block_size = argument(arguments, places.BLOCK_SIZE)
    width = num_heads * head_dim
    for head in range(num_heads):
        tokens.decay_weights(arguments, p_scratch, head, block_size - 1)
        whole = exp(splat(tokens.sum_at(arguments, p_scratch, head, block_size - 1)))
        for column in range(head * head_dim, (head + 1) * head_dim, NUM_LANES):
            p_from = rows.column_of(p_pieces, column, columns) if p_pieces else 0
            p_to = rows.column_of(p_next, column, columns)
            for n in range(state_dim):
                at = 4 * n * columns
                state = splat(F32(0))
                if p_from:
                    state = mul(load(p_from + at, F32_ELEMENT), whole)
                for j in range(block_size):
                    left = load(tokens.at_left(arguments, p_scratch, j), F32_ELEMENT)
                    key = mul(splat(float32_at(p_keys + 4 * (j * state_dim + n))), left)
                    p_value = p_values + 4 * (j * width + column)
                    state = fma(key, load(p_value, F32_ELEMENT), state)
                store(p_to + at, state, F32_ELEMENT)


@njit
def _block_of(arguments: int, p_scratch: int, p_unit: int) -> Any:
    """Addresses of a block's decays, keys and values: in a unit's tail, or in the scratch."""
    if p_unit:
        return (
            p_unit + argument(arguments, places.DECAYS_AT),
            p_unit + argument(arguments, places.KEYS_AT),
            p_unit + argument(arguments, places.VALUES_AT),
        )
    return tokens.at_block(arguments, p_scratch)


@njit
def _compute(arguments: int, i: int, p_scratch: int, element: Any) -> None:
    """Computes an item: some heads of one row."""
    num_units = argument(arguments, rows.NUM_UNITS)
    row = i // num_units
    unit = i % num_units
    start = rows.number_of(arguments, rows.STARTS, row)
    end = rows.number_of(arguments, rows.ENDS, row)
    if end <= start:
        return
    block_size = argument(arguments, places.BLOCK_SIZE)
    first = start // block_size
    last = end // block_size
    p_first = rows.tail_of(arguments, rows.FIRST, row, unit)
    p_last = rows.tail_of(arguments, rows.LAST, row, unit)
    first_token = rows.number_of(arguments, rows.TOKENS, row)
    tokens.begin(arguments, p_scratch, p_first, start, element)
    p_own, p_next_own = tokens.pieces_of(arguments, p_scratch, row, unit)
    # The state before a sequence is zeros, and no page holds it.
    p_pieces = p_own if first else 0
    for block in range(first, last + 1):
        p_unit = p_first if block == first else p_last if block == last else 0
        p_block = _block_of(arguments, p_scratch, p_unit)
        border = block * block_size
        begin = max(start, border)
        tokens.sum_decays(arguments, p_scratch, p_block[0], begin - border)
        for position in range(begin, min(end, border + block_size)):
            token = first_token + position - start
            at = position - border
            tokens.mix(arguments, p_scratch, position, token, unit, element)
            if p_unit:
                tokens.keep_inputs(arguments, p_scratch, position, p_unit, at, element)
            tokens.step(arguments, p_scratch, p_block, token, unit, at, element)
            _write(arguments, p_scratch, p_pieces, p_block, token, unit, at, element)
        if block < last:
            p_next = p_next_own if block + 1 == last else tokens.own_pieces(arguments, p_scratch)
            _advance(arguments, p_scratch, p_pieces, p_block, p_next)
            p_pieces = p_next
            if block + 1 == last:
                tokens.keep_before(arguments, p_scratch, last * block_size, p_last, element)


def _heads(element: Any) -> Any:
    def work(arguments: int) -> None:
        memory = np.empty(tokens.scratch_size(arguments), np.float32)
        for i in items(arguments):
            _compute(arguments, i, memory.ctypes.data, element)

    return work


KERNEL = Kernel(_heads(F32_ELEMENT), _heads(BF16_ELEMENT))
