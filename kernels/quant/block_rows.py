"""Rows of a table in a block format: in plain torch, the specification of the CPU's kernel."""

from __future__ import annotations

import torch

from .block_formats import TILE_ROWS, BlockWeight, expand


def block_rows(weight: BlockWeight, row_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of weight [N, K] at row_ids, integers [T], as [T, K] of the dtype; the bits are those of
    the expanded weight."""
    tiles = weight.tiles[row_ids // TILE_ROWS]
    whole = expand(
        BlockWeight(format=weight.format, tiles=tiles, num_rows=len(tiles) * TILE_ROWS), dtype
    )
    return whole[torch.arange(len(row_ids)) * TILE_ROWS + row_ids % TILE_ROWS]
