"""A layer of gated delta nets between its projections, on a CPU: convolution, gates, norms and the
delta rule, over states in pages. Twin: `kernels.delta.delta_twin`.

A token's numbers are computed from the state at the last border and from the block's solved rows
before it, in one order. So its bits do not depend on how many tokens a pass computes.
"""

from __future__ import annotations

from itertools import chain

import torch

from ...delta.delta_arguments import DeltaLayer, HeadPlaces, StateMemory
from ...delta.delta_unit import DeltaUnit
from ..compiler.compiled import float_bits
from ..compiler.simd_types import NUM_LANES
from . import places
from .delta_kernel import KERNEL


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
    num_rows, num_pages = memory.first.shape
    num_heads = layer.num_heads
    width = layer.values_size
    out = wide.new_empty(len(wide), width)
    KERNEL(
        wide.dtype,
        num_rows * num_heads,
        len(wide) * width * unit.key_dim,
        *(wide.data_ptr(), wide.stride(0), narrow.data_ptr(), narrow.stride(0)),
        *(layer.conv.data_ptr(), layer.rates.data_ptr(), layer.biases.data_ptr()),
        *(layer.norm.data_ptr(), float_bits(layer.eps), out.data_ptr()),
        *(memory.pages.data_ptr(), memory.pages.stride(0)),
        *(memory.first.data_ptr(), memory.last.data_ptr(), num_pages),
        *(memory.starts.data_ptr(), memory.tokens.data_ptr()),
        *(memory.first_unit, memory.units_per_page, memory.unit_bytes),
        *(num_heads, unit.num_values, unit.key_dim, unit.value_dim, unit.block_size),
        *(unit.inputs_at, unit.gates_at, unit.keys_at, unit.values_at),
        *_flat(layer.places),
        float_bits(unit.key_dim**-0.5),
        memory.ends.data_ptr(),
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
    return unit.state_size + of_tokens + 2 * unit.num_channels + lists
