"""x @ weight.T of weights in groups and activations in 8 bits on a CPU. Twin:
`kernels.quant.group_linear`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..quant.block_formats import BLOCK
from ..quant.group_tiles import GroupTiles
from .group_tiles import units_of
from .tile_product import Part, TileProduct


def group_product(weight: GroupTiles) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product of x [T, K], contiguous, as [T, N] in x's dtype."""
    units = units_of(weight.tiles.shape[1], weight.group_size // BLOCK)
    part = Part(weight.format, weight.tiles, units, weight.num_rows)
    order = weight.order
    product = TileProduct([part], weight.shape[1], rounds_tokens=weight.rounds_tokens)
    return product if order is None else lambda x: product(x[:, order])


def group_linear(x: torch.Tensor, weight: GroupTiles) -> torch.Tensor:
    """x [T, K], contiguous, times weight [N, K]: [T, N] in x's dtype."""
    return group_product(weight)(x)
