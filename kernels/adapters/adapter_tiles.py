"""Rows of a step in tiles of one adapter each, for products with low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FEW_ROWS = 512
"""Most rows of a step whose tiles one program makes, and whose products are divided by pieces of
inputs."""
FEW_TILE = 16
MANY_TILE = 32
"""Rows of a tile. From 64 on, products would be made by other instructions, with other bits."""
NO_ROW = -1
NO_ADAPTER = -1
_OTHERS = 32
"""Rows that all rows are compared with at once."""


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """Tiles of a step's rows; on the device, which alone knows how many there are. Tiles of rows
    without an adapter follow all others."""

    rows: torch.Tensor
    """int32 [most tiles, rows of a tile]; −1: none."""
    slots: torch.Tensor
    """int32 [most tiles] slot of each tile's adapter; −1: none."""
    ranks: torch.Tensor
    """int32 [most tiles] padded rank of each tile's adapter; 0: none."""
    count: torch.Tensor
    """int32 [2] number of tiles with adapters, and of all."""
    num_rows: int
    """Rows of the step."""

    @property
    def tile_size(self) -> int:
        return self.rows.shape[1]

    @property
    def is_few(self) -> bool:
        return self.num_rows <= FEW_ROWS


def adapter_tiles(slots: torch.Tensor, num_ranks: torch.Tensor) -> AdapterTiles:
    """Tiles of rows with adapters in `slots`, int32 [T]; −1: no adapter. num_ranks int32 [slots]:
    padded rank of the adapter of each slot."""
    num_rows = len(slots)
    if num_rows > FEW_ROWS:
        return _of_many(slots, num_ranks)
    tiles = AdapterTiles(
        slots.new_empty(num_rows, FEW_TILE),
        slots.new_empty(num_rows),
        slots.new_empty(num_rows),
        slots.new_empty(2),
        num_rows,
    )
    scratch = slots.new_empty(2, num_rows)
    _few_tiles[(1,)](
        slots,
        num_ranks,
        tiles.rows,
        tiles.slots,
        tiles.ranks,
        tiles.count,
        scratch,
        num_rows,
        TILE=FEW_TILE,
        BLOCK=triton.next_power_of_2(num_rows),
        OTHERS=_OTHERS,
        num_warps=8,
    )
    return tiles


def _of_many(slots: torch.Tensor, num_ranks: torch.Tensor) -> AdapterTiles:
    """Rows in the order of their slots, cut where the slot changes and at every full tile."""
    num_rows = len(slots)
    num_slots = len(num_ranks)
    most = -(-num_rows // MANY_TILE) + min(num_slots + 1, num_rows)
    ordered, order = torch.sort(torch.where(slots < 0, num_slots, slots), stable=True)
    at = torch.arange(num_rows, device=slots.device)
    begins = torch.ones_like(slots, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    place = at - torch.cummax(torch.where(begins, at, 0), 0).values
    leads = place % MANY_TILE == 0
    tile = torch.cumsum(leads, 0) - 1
    rows = slots.new_full((most, MANY_TILE), NO_ROW)
    rows.view(-1).scatter_(0, tile * MANY_TILE + place % MANY_TILE, order.int())
    # Entries behind the last tile have arbitrary slots.
    of_tiles = slots.new_zeros(most).scatter_(0, tile, ordered.int())
    has_adapter = of_tiles < num_slots
    ranks = torch.where(has_adapter, num_ranks[of_tiles.clamp(max=num_slots - 1)], 0)
    count = torch.stack([(leads & (ordered < num_slots)).sum(), leads.sum()]).int()
    of_tiles = torch.where(has_adapter, of_tiles, NO_ADAPTER)
    return AdapterTiles(rows, of_tiles, ranks, count, num_rows)


def adapter_tiles_twin(slots: torch.Tensor, tile_size: int) -> dict[int, list[list[int]]]:
    """Rows of each tile by slot, −1: none."""
    rows: dict[int, list[int]] = {}
    for row, slot in enumerate(slots.tolist()):
        rows.setdefault(slot, []).append(row)
    return {
        slot: [each[i : i + tile_size] for i in range(0, len(each), tile_size)]
        for slot, each in rows.items()
    }


@triton.jit(do_not_specialize=["num_rows"])
def _few_tiles(
    p_slots,
    p_num_ranks,
    p_rows,
    p_tile_slots,
    p_tile_ranks,
    p_count,
    p_scratch,
    num_rows,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """A row leads a tile where a multiple of TILE rows before it have its slot. The leader of
    another row's tile has its slot, and so many fewer rows before it as the row's place says."""
    o_row = tl.arange(0, BLOCK)
    inside = o_row < num_rows
    b_slot = tl.load(p_slots + o_row, mask=inside, other=-1)
    b_before = tl.zeros((BLOCK,), tl.int32)
    # Some rows at a time: one after another, each would wait for its own load.
    for first in range(0, num_rows, OTHERS):
        o_other = first + tl.arange(0, OTHERS)
        b_other = tl.load(p_slots + o_other, mask=o_other < num_rows, other=-1)
        is_before = (b_slot[:, None] == b_other[None, :]) & (o_row[:, None] > o_other[None, :])
        b_before += tl.sum(is_before.to(tl.int32), 1)
    b_place = b_before % TILE
    b_leads = inside & (b_place == 0)
    b_adapts = b_leads & (b_slot >= 0)
    b_others = (b_leads & (b_slot < 0)).to(tl.int32)
    num_adapted = tl.sum(b_adapts.to(tl.int32), 0)
    b_tile = tl.cumsum(b_adapts.to(tl.int32), 0)
    b_tile = tl.where(b_slot >= 0, b_tile, num_adapted + tl.cumsum(b_others, 0)) - 1
    tl.store(p_count, num_adapted)
    tl.store(p_count + 1, num_adapted + tl.sum(b_others, 0))
    tl.store(p_tile_slots + b_tile, b_slot, mask=b_leads)
    b_rank = tl.load(p_num_ranks + b_slot, mask=b_adapts, other=0)
    tl.store(p_tile_ranks + b_tile, b_rank, mask=b_leads)
    tl.store(p_scratch + o_row, tl.where(b_leads, b_before, -1), mask=inside)
    tl.store(p_scratch + num_rows + o_row, b_tile, mask=inside)
    for i in range(TILE):
        tl.store(p_rows + o_row * TILE + i, -1, mask=inside)
    tl.debug_barrier()
    b_own_tile = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_rows, OTHERS):
        o_other = first + tl.arange(0, OTHERS)
        is_row = o_other < num_rows
        b_other = tl.load(p_slots + o_other, mask=is_row, other=-1)
        b_lead = tl.load(p_scratch + o_other, mask=is_row, other=-1)
        b_other_tile = tl.load(p_scratch + num_rows + o_other, mask=is_row, other=0)
        is_leader = (b_slot[:, None] == b_other[None, :]) & (
            (b_before - b_place)[:, None] == b_lead[None, :]
        )
        b_own_tile += tl.sum(tl.where(is_leader, b_other_tile[None, :], 0), 1)
    tl.store(p_rows + b_own_tile * TILE + b_place, o_row, mask=inside)
