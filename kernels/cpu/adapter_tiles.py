"""Rows of a pass in tiles of one adapter each, on a CPU."""

from __future__ import annotations

import torch
from numba import njit

from .compiler.compiled import Kernel, argument, items
from .compiler.scalars import int32_at, put_int32

TILE = 4
NO_ROW = -1


def adapter_tiles(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """int32 [T, TILE] rows of tiles in the order in which rows with an adapter come, each tile's
    from its first place on; −1: none. slots int32 [T]: of each row's adapter; −1: none."""
    num_rows = len(slots)
    tiles = slots.new_empty(num_rows, TILE)
    open_tiles = slots.new_empty(num_slots)
    KERNEL(
        torch.float32,
        1,
        num_rows,
        *(slots.data_ptr(), tiles.data_ptr(), open_tiles.data_ptr(), num_rows),
    )
    return tiles


@njit
def _fill(p_slots: int, p_tiles: int, p_open: int, num_rows: int) -> None:
    for i in range(TILE * num_rows):
        put_int32(p_tiles + 4 * i, NO_ROW)
    for i in range(num_rows):
        slot = int32_at(p_slots + 4 * i)
        if slot >= 0:
            put_int32(p_open + 4 * slot, NO_ROW)
    count = 0
    for i in range(num_rows):
        slot = int32_at(p_slots + 4 * i)
        if slot < 0:
            continue
        tile = int32_at(p_open + 4 * slot)
        if tile == NO_ROW or int32_at(p_tiles + 4 * (TILE * tile + TILE - 1)) != NO_ROW:
            tile = count
            count += 1
            put_int32(p_open + 4 * slot, tile)
        place = TILE * tile
        while int32_at(p_tiles + 4 * place) != NO_ROW:
            place += 1
        put_int32(p_tiles + 4 * place, i)


def _whole(arguments: int) -> None:
    for _ in items(arguments):
        _fill(
            argument(arguments, 0),
            argument(arguments, 1),
            argument(arguments, 2),
            argument(arguments, 3),
        )


KERNEL = Kernel(_whole, _whole)
