"""A layer of gated delta nets between its projections, on a CPU: convolution, gates, norms and the
delta rule, over states in pages. Twin: `kernels.delta.delta_twin`.

A token's numbers are computed from the state at the last border and from the block's solved rows
before it, in one order. So its bits do not depend on how many tokens a pass computes.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from numba import njit

from ...delta.delta_arguments import DeltaLayer, HeadPlaces
from ...delta.delta_unit import NUM_BEFORE, DeltaUnit
from ...states.state_memory import StateMemory
from ..compiler.compiled import Kernel, argument, float_bits, items
from ..compiler.scalars import float32_at
from ..compiler.simd import splat, store
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from ..states import rows
from . import blocks, places, scratch, tokens


def delta_net(
    wide: torch.Tensor,
    narrow: torch.Tensor,
    layer: DeltaLayer,
    memory: StateMemory,
) -> torch.Tensor:
    """Projections [T, …] of the rows of a batch, contiguous → gated and normed heads [T, value
    heads · value_dim]. Reads the states of the rows' first blocks, appends to their tails, and
    writes those of their last blocks. Heads of keys and values divide by 32."""
    unit = layer.unit
    assert unit.keeps_solved
    assert unit.key_dim % places.WIDTH == unit.value_dim % places.WIDTH == 0
    assert wide.stride(1) == narrow.stride(1) == 1
    assert unit.element_size == wide.element_size()
    width = layer.values_size
    out = wide.new_empty(len(wide), width)
    KERNEL(
        wide.dtype,
        len(memory.starts) * layer.num_heads,
        len(wide) * width * unit.key_dim,
        *rows.row_arguments(memory, layer.num_heads),
        *(wide.data_ptr(), wide.stride(0), narrow.data_ptr(), narrow.stride(0)),
        *(layer.conv.data_ptr(), layer.rates.data_ptr(), layer.biases.data_ptr()),
        *(layer.norm.data_ptr(), float_bits(layer.eps), out.data_ptr()),
        *(unit.num_values, unit.key_dim, unit.value_dim, unit.block_size),
        *(unit.gates_at, unit.keys_at, unit.values_at, unit.columns),
        *_flat(layer.places),
        float_bits(unit.key_dim**-0.5),
        _scratch_size(unit),
    )
    return out


def _flat(heads: HeadPlaces) -> tuple[int, ...]:
    """Places as arguments, from that of queries on."""
    order = heads.query, heads.key, heads.value, heads.z, heads.decay, heads.share
    return tuple(chain(*order))


def _scratch_size(unit: DeltaUnit) -> int:
    """Numbers of a thread's scratch."""
    of_tokens = unit.block_size * (unit.key_dim + unit.num_values * (unit.value_dim + 3))
    lists = 3 * (unit.block_size + NUM_LANES)
    # Addresses of the pieces of three states, of 8 bytes each.
    return unit.state_size + of_tokens + 2 * unit.num_channels + lists + 6 * unit.num_pieces


@njit
def _compute(arguments: int, i: int, p_scratch: int, element: Any) -> None:
    """Computes an item: one key head of one row."""
    num_heads = argument(arguments, rows.NUM_UNITS)
    row = i // num_heads
    head = i % num_heads
    start = rows.number_of(arguments, rows.STARTS, row)
    first_token = rows.number_of(arguments, rows.TOKENS, row)
    end = rows.number_of(arguments, rows.ENDS, row)
    if end <= start:
        return
    block_size = argument(arguments, places.BLOCK_SIZE)
    first = start // block_size
    last = end // block_size
    p_first = rows.tail_of(arguments, rows.FIRST, row, head)
    p_last = rows.tail_of(arguments, rows.LAST, row, head)
    p_own, p_next_own = scratch.pieces_of(arguments, p_scratch, row, head)
    # The state before a sequence is zeros, and no page holds it.
    p_pieces = p_own if first else 0
    for block in range(first, last + 1):
        p_unit = p_first if block == first else p_last if block == last else 0
        p_keys = (
            p_unit + argument(arguments, places.KEYS_AT)
            if p_unit
            else scratch.at_keys(arguments, p_scratch)
        )
        p_solved = (
            p_unit + argument(arguments, places.VALUES_AT)
            if p_unit
            else scratch.at_solved(arguments, p_scratch)
        )
        p_gates = (
            p_unit + argument(arguments, places.GATES_AT)
            if p_unit
            else scratch.at_gates(arguments, p_scratch)
        )
        border = block * block_size
        begin = max(start, border)
        tokens.sum_decays(arguments, p_scratch, p_gates, begin - border)
        for position in range(begin, min(end, border + block_size)):
            token = first_token + position - start
            at = position - border
            if p_unit:
                tokens.keep_inputs(
                    arguments, p_scratch, i, position, p_unit, NUM_BEFORE + at, element
                )
            tokens.mix(arguments, p_scratch, i, position, element)
            tokens.normalize(arguments, p_scratch, p_keys, at)
            tokens.gate(arguments, p_scratch, token, head, p_gates, at, element)
            blocks.multiply_keys(arguments, p_scratch, p_keys, at)
            for value in range(argument(arguments, places.NUM_VALUES)):
                share = float32_at(
                    p_gates + 8 * (at * argument(arguments, places.NUM_VALUES) + value) + 4
                )
                blocks.solve(arguments, p_scratch, p_pieces, p_keys, p_solved, share, value, at)
                tokens.norm(arguments, p_scratch, token, head, value, element)
        if block < last:
            p_next = p_next_own if block + 1 == last else scratch.own_pieces(arguments, p_scratch)
            blocks.advance(arguments, p_scratch, p_pieces, p_keys, p_solved, p_next)
            p_pieces = p_next
    if first < last:
        for place in range(NUM_BEFORE):
            position = last * block_size - NUM_BEFORE + place
            tokens.keep_inputs(arguments, p_scratch, i, position, p_last, place, element)


def _heads(element: Any) -> Any:
    def work(arguments: int) -> None:
        memory = np.empty(argument(arguments, places.SCRATCH), np.float32)
        p_zeros = scratch.at_zeros(arguments, memory.ctypes.data)
        for d in range(0, scratch.num_channels(arguments), NUM_LANES):
            store(p_zeros + 4 * d, splat(F32(0)), F32_ELEMENT)
        for i in items(arguments):
            _compute(arguments, i, memory.ctypes.data, element)

    return work


KERNEL = Kernel(_heads(F32_ELEMENT), _heads(BF16_ELEMENT))
