"""x @ weight.T of block weights and activations in 8 bits on a CPU. Twin:
`kernels.quant.block_linear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..quant.block_formats import BlockWeight
from .tile_product import Part, TileProduct


def block_product(parts: Sequence[BlockWeight]) -> TileProduct:
    """Product with parts [N_i, K], whose outputs are concatenated."""
    tiles = [Part(part.format, part.tiles, part.tiles.shape[1], part.num_rows) for part in parts]
    return TileProduct(tiles, parts[0].shape[1])


def block_linear(x: torch.Tensor, parts: Sequence[BlockWeight]) -> torch.Tensor:
    """x [T, K] contiguous, parts [N_i, K]; returns [T, N] in x's dtype."""
    return block_product(parts)(x)
