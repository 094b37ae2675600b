"""A layer of a short causal convolution between its projections, on a CPU, over states in pages.
Twin: `kernels.conv.conv_twin`.

A gated input is rounded to an element before anything reads it, so that a token has the same bits
whether the inputs before it are of the same pass or of a state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from ...conv.conv_layer import ConvLayer
from ...states.state_memory import StateMemory
from ..compiler.compiled import Kernel, argument, items
from ..compiler.scalars import size_of
from ..compiler.simd import fma, load, mul, splat, store
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from . import rows

PARTS = rows.OWN
PARTS_STRIDE = rows.OWN + 1
TAPS = rows.OWN + 2
OUT = rows.OWN + 3
NUM_CHANNELS = rows.OWN + 4
WIDTH = rows.OWN + 5
BLOCK_SIZE = rows.OWN + 6
"""Places of the kernel's own arguments."""


def short_conv(parts: torch.Tensor, layer: ConvLayer, memory: StateMemory) -> torch.Tensor:
    """parts [T, 3 H] of the rows of a batch: gates of the inputs, gates of the outputs, and inputs
    of each token → [T, H]. Reads the states of the rows' first blocks, appends to them, and writes
    those of their last blocks. Units have a multiple of `NUM_LANES` channels."""
    unit = layer.unit
    assert parts.stride(1) == 1
    assert unit.num_channels % NUM_LANES == 0
    num_rows = len(memory.starts)
    hidden = layer.taps.shape[1]
    out = parts.new_empty(len(parts), hidden)
    KERNEL(
        parts.dtype,
        num_rows * layer.num_units,
        len(parts) * hidden * unit.width,
        *rows.row_arguments(memory, layer.num_units),
        *(parts.data_ptr(), parts.stride(0), layer.taps.data_ptr(), out.data_ptr()),
        *(unit.num_channels, unit.width, unit.block_size),
    )
    return out


@njit
def _begin(arguments: int, p_ring: int, p_first: int, start: int, element: Any) -> None:
    """Puts the inputs before the row's first token into the ring: those of its state, and zeros
    before the sequence."""
    num_channels = argument(arguments, NUM_CHANNELS)
    width = argument(arguments, WIDTH)
    row_bytes = num_channels * size_of(element)
    border = start // argument(arguments, BLOCK_SIZE) * argument(arguments, BLOCK_SIZE)
    for back in range(1, width):
        position = start - back
        p_row = p_ring + (position + width) % width * row_bytes
        if position < 0:
            for d in range(0, num_channels, NUM_LANES):
                store(p_row + d * size_of(element), splat(F32(0)), element)
        else:
            row = width - 1 + position - border
            rows.copy(p_first + row * row_bytes, p_row, num_channels, element)


@njit
def _mix(
    arguments: int, p_ring: int, position: int, token: int, channel: int, element: Any
) -> None:
    """Puts a token's gated input into the ring, and writes its gated sum of inputs."""
    size = size_of(element)
    num_channels = argument(arguments, NUM_CHANNELS)
    width = argument(arguments, WIDTH)
    hidden = num_channels * argument(arguments, rows.NUM_UNITS)
    row_bytes = num_channels * size
    p_before = (
        argument(arguments, PARTS) + (token * argument(arguments, PARTS_STRIDE) + channel) * size
    )
    p_own = p_ring + position % width * row_bytes
    for d in range(0, num_channels, NUM_LANES):
        at = d * size
        x = load(p_before + 2 * hidden * size + at, element)
        store(p_own + at, mul(load(p_before + at, element), x), element)
        total = splat(F32(0))
        for tap in range(width):
            p_row = p_ring + (position + 1 + tap) % width * row_bytes
            p_tap = argument(arguments, TAPS) + 4 * (tap * hidden + channel + d)
            total = fma(load(p_row + at, element), load(p_tap, F32_ELEMENT), total)
        p_out = argument(arguments, OUT) + (token * hidden + channel + d) * size
        store(p_out, mul(load(p_before + hidden * size + at, element), total), element)


@njit
def _compute(arguments: int, i: int, p_ring: int, element: Any) -> None:
    """Computes an item: some channels of one row. The ring [width, channels] holds the inputs of
    the last tokens, each at its position's remainder."""
    num_units = argument(arguments, rows.NUM_UNITS)
    row = i // num_units
    unit = i % num_units
    start = rows.number_of(arguments, rows.STARTS, row)
    end = rows.number_of(arguments, rows.ENDS, row)
    if end <= start:
        return
    num_channels = argument(arguments, NUM_CHANNELS)
    width = argument(arguments, WIDTH)
    block_size = argument(arguments, BLOCK_SIZE)
    row_bytes = num_channels * size_of(element)
    first = start // block_size
    last = end // block_size
    p_first = rows.tail_of(arguments, rows.FIRST, row, unit)
    p_last = rows.tail_of(arguments, rows.LAST, row, unit)
    first_token = rows.number_of(arguments, rows.TOKENS, row)
    _begin(arguments, p_ring, p_first, start, element)
    for position in range(start, end):
        token = first_token + position - start
        _mix(arguments, p_ring, position, token, unit * num_channels, element)
        block = position // block_size
        p_own = p_ring + position % width * row_bytes
        place = (width - 1 + position % block_size) * row_bytes
        if block == first:
            rows.copy(p_own, p_first + place, num_channels, element)
        elif block == last:
            rows.copy(p_own, p_last + place, num_channels, element)
        if first < last and position + 1 == last * block_size:
            for back in range(1, width):
                p_row = p_ring + (position + 1 - back) % width * row_bytes
                rows.copy(p_row, p_last + (width - 1 - back) * row_bytes, num_channels, element)


def _channels(element: Any) -> Any:
    def work(arguments: int) -> None:
        size = argument(arguments, WIDTH) * argument(arguments, NUM_CHANNELS)
        memory = np.empty(size, np.float32)
        for i in items(arguments):
            _compute(arguments, i, memory.ctypes.data, element)

    return work


KERNEL = Kernel(_channels(F32_ELEMENT), _channels(BF16_ELEMENT))
