"""The kernel of `delta_net`: one key head of one row of a batch after another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ...delta.delta_unit import NUM_BEFORE
from ..compiler.compiled import Kernel, argument, items
from ..compiler.scalars import float32_at, int32_at
from ..compiler.simd import splat, store
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from . import places
from .blocks import advance, multiply_keys, solve
from .scratch import at_gates, at_keys, at_solved, at_zeros, num_channels
from .tokens import (
    first_token_of,
    gate,
    keep_inputs,
    mix,
    norm,
    normalize,
    start_of,
    sum_decays,
    unit_of,
)


@njit
def _compute(arguments: int, i: int, p_scratch: int, element: Any) -> None:
    """Computes an item: one key head of one row."""
    num_heads = argument(arguments, places.NUM_HEADS)
    head = i % num_heads
    start = start_of(arguments, i)
    first_token = first_token_of(arguments, i)
    end = int32_at(argument(arguments, places.ENDS) + 4 * (i // num_heads))
    if end <= start:
        return
    block_size = argument(arguments, places.BLOCK_SIZE)
    first = start // block_size
    last = end // block_size
    p_first = unit_of(arguments, places.FIRST, i)
    p_last = unit_of(arguments, places.LAST, i)
    # The state before a sequence is zeros, and no page holds it.
    p_state = p_first if first else 0
    for block in range(first, last + 1):
        p_unit = p_first if block == first else p_last if block == last else 0
        p_keys = (
            p_unit + argument(arguments, places.KEYS_AT)
            if p_unit
            else at_keys(arguments, p_scratch)
        )
        p_solved = (
            p_unit + argument(arguments, places.VALUES_AT)
            if p_unit
            else at_solved(arguments, p_scratch)
        )
        p_gates = (
            p_unit + argument(arguments, places.GATES_AT)
            if p_unit
            else at_gates(arguments, p_scratch)
        )
        border = block * block_size
        begin = max(start, border)
        sum_decays(arguments, p_scratch, p_gates, begin - border)
        for position in range(begin, min(end, border + block_size)):
            token = first_token + position - start
            at = position - border
            if p_unit:
                keep_inputs(arguments, p_scratch, i, position, p_unit, NUM_BEFORE + at, element)
            mix(arguments, p_scratch, i, position, element)
            normalize(arguments, p_scratch, p_keys, at)
            gate(arguments, p_scratch, token, head, p_gates, at, element)
            multiply_keys(arguments, p_scratch, p_keys, at)
            for value in range(argument(arguments, places.NUM_VALUES)):
                share = float32_at(
                    p_gates + 8 * (at * argument(arguments, places.NUM_VALUES) + value) + 4
                )
                solve(arguments, p_scratch, p_state, p_keys, p_solved, share, value, at)
                norm(arguments, p_scratch, token, head, value, element)
        if block < last:
            p_next = p_last if block + 1 == last else p_scratch
            advance(arguments, p_scratch, p_state, p_keys, p_solved, p_next)
            p_state = p_next
    if first < last:
        for row in range(NUM_BEFORE):
            position = last * block_size - NUM_BEFORE + row
            keep_inputs(arguments, p_scratch, i, position, p_last, row, element)


def _heads(element: Any) -> Any:
    def work(arguments: int) -> None:
        scratch = np.empty(argument(arguments, places.SCRATCH), np.float32)
        p_zeros = at_zeros(arguments, scratch.ctypes.data)
        for d in range(0, num_channels(arguments), NUM_LANES):
            store(p_zeros + 4 * d, splat(F32(0)), F32_ELEMENT)
        for i in items(arguments):
            _compute(arguments, i, scratch.ctypes.data, element)

    return work


KERNEL = Kernel(_heads(F32_ELEMENT), _heads(BF16_ELEMENT))
