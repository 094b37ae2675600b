"""A layer of gated delta nets between its projections, over states in pages. Twin: `delta_twin`."""

from __future__ import annotations

from typing import Any

import torch

from ..launch.dependent_launch import EARLY_TOKENS
from ..states.state_memory import StateMemory
from .block_states import block_states
from .delta_arguments import DeltaLayer
from .delta_tokens import delta_tokens, serves
from .gated_norm import gated_norm
from .inverse_rows import inverse_rows
from .mix_inputs import mix_inputs


def delta_net(
    wide: torch.Tensor,
    narrow: torch.Tensor,
    layer: DeltaLayer,
    memory: StateMemory,
    *,
    are_neighbours: bool = False,
    dependent: bool = False,
) -> torch.Tensor:
    """Projections [T, …] of the rows of a batch → gated and normed heads [T, value heads ·
    value_dim]; of tokens of no row zeros. Reads the states of the rows' first blocks, appends to
    their tails, and writes those of their last blocks. `are_neighbours`: rows of one token may be
    successive tokens of a sequence, at most as many as a block has. With `dependent`, the previous
    kernels may still be writing the projections."""
    if serves(wide, layer.unit, memory, are_neighbours=are_neighbours):
        return delta_tokens(wide, narrow, layer, memory, dependent=dependent)
    # Larger launches take longer with it.
    early: dict[str, Any] = {"dependent": dependent and len(wide) <= EARLY_TOKENS}
    rows_of: dict[str, Any] = early | {"are_neighbours": are_neighbours}
    mixed = mix_inputs(wide, narrow, layer, memory, **rows_of)
    given = mixed, inverse_rows(mixed, layer, memory, **rows_of), layer, memory
    if are_neighbours:
        # Rows behind a border read the state that a row before it writes.
        block_states(*given, **rows_of, advances=True)
    return gated_norm(block_states(*given, **rows_of), wide, layer, **early)
