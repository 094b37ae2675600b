"""A Mamba-2 layer between its projection and its norm, on a GPU, over states in pages. Twin:
`mamba_twin`."""

from __future__ import annotations

import torch

from ..states.state_memory import StateMemory
from .block_states import block_states
from .mamba_layer import MambaLayer
from .mix_channels import mix_channels


def mamba(
    parts: torch.Tensor, layer: MambaLayer, memory: StateMemory, *, are_neighbours: bool = False
) -> torch.Tensor:
    """The projection [T, …] of the rows of a batch → gated outputs [T, heads · head_dim]; of tokens
    of no row zeros. Reads the states of the rows' first blocks, appends to their tails, and writes
    those of their last blocks. `are_neighbours`: rows of one token may be successive tokens of a
    sequence, at most as many as a block has."""
    assert parts.stride(1) == 1
    assert not layer.unit.is_wide or parts.dtype == torch.float32
    mixed = mix_channels(parts, layer, memory, are_neighbours=are_neighbours)
    given = mixed, parts, layer, memory
    if are_neighbours:
        # Rows behind a border read the state that a row before it writes.
        block_states(*given, are_neighbours=True, advances=True)
    return block_states(*given, are_neighbours=are_neighbours)
