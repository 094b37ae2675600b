"""Sorts the rows of a batch by their experts and cuts each expert's rows into tiles, on the GPU.
Sizes depend on the number of rows alone, so that a graph holds for any routing.

A pair is a token and one of its k experts: pair i is of token i // k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs

MOST_AT_ONCE = 2048
"""Most pairs of which one launch makes the list; three launches make that of more."""
SMALL_BLOCK = 512
"""Number of pairs that a program looks at where there are no more."""
SEGMENT = 1024
"""Number of pairs that are counted apart in three launches."""
SEGMENTS_AT_ONCE = 64
"""Number of segments whose counts a program of the second launch adds at once."""
EXPERTS_AT_ONCE = 8
"""Number of experts whose rows a program of the third launch places."""


@dataclass(frozen=True, slots=True)
class WorkList:
    block_m: int
    """Most rows in a tile."""
    num_rows: int
    """Most sorted rows, those between experts included."""
    max_tiles: int
    pairs: torch.Tensor
    """int32 [num_rows]: the pair of each sorted row. Rows of an expert follow one another in the
    order of their tokens; rows between the last one of an expert and the next expert's first have
    any number."""
    places: torch.Tensor
    """int32 [T k]: the sorted row of each pair; −1 of a pair whose expert is −1."""
    tiles: torch.Tensor
    """int32 [3, max_tiles]: expert, first sorted row and number of rows of each tile; tiles of an
    expert follow one another."""
    num_tiles: torch.Tensor
    """int32 [1]"""


def list_tiles(
    experts: torch.Tensor,
    num_experts: int,
    *,
    block_m: int,
    align: int = 1,
    dependent: bool = False,
) -> WorkList:
    """Tiles of up to block_m rows for experts int32 [T, k]; of expert −1 there are none. An
    expert's rows begin at a multiple of `align`."""
    num_pairs = experts.numel()
    assert block_m % align == 0
    assert experts.is_contiguous()
    num_rows = align * most_tiles(num_pairs, num_experts, align)
    max_tiles = most_tiles(num_pairs, num_experts, block_m)
    empty = experts.new_empty
    work = WorkList(
        block_m,
        num_rows,
        max_tiles,
        empty(num_rows),
        empty(num_pairs),
        empty(3, max_tiles),
        empty(1),
    )
    cut = {"BLOCK_M": block_m, "ALIGN": align}
    common = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS": triton.next_power_of_2(num_experts),
        "DEPENDENT": dependent,
        "num_warps": 8,
    } | launch_options(dependent)
    if num_pairs <= MOST_AT_ONCE:
        block = MOST_AT_ONCE if num_pairs > SMALL_BLOCK else SMALL_BLOCK
        _list_tiles[(num_experts,)](
            experts,
            work.pairs,
            work.places,
            work.tiles,
            work.num_tiles,
            num_pairs,
            max_tiles,
            BLOCK=block,
            **cut,
            **common,
        )
    else:
        _list_in_segments(experts, work, cut, common)
    return work


def _list_in_segments(
    experts: torch.Tensor,
    work: WorkList,
    cut: dict[str, int],
    common: dict[str, int | bool],
) -> None:
    num_pairs = experts.numel()
    num_experts = common["NUM_EXPERTS"]
    num_segments = triton.cdiv(num_pairs, SEGMENT)
    counts, first_rows = experts.new_empty(2, num_segments, num_experts)
    _count_pairs[(num_segments,)](experts, counts, num_pairs, SEGMENT=SEGMENT, **common)
    _cut_tiles[(num_experts,)](
        counts,
        first_rows,
        work.tiles,
        work.num_tiles,
        num_segments,
        work.max_tiles,
        SEGMENTS=SEGMENTS_AT_ONCE,
        **cut,
        **common,
    )
    _place_pairs[(num_segments, triton.cdiv(num_experts, EXPERTS_AT_ONCE))](
        experts,
        first_rows,
        work.pairs,
        work.places,
        num_pairs,
        SEGMENT=SEGMENT,
        EXPERTS_AT_ONCE=EXPERTS_AT_ONCE,
        **common,
    )


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Largest number of tiles into which any routing cuts so many pairs."""
    return (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _list_tiles(
    p_experts,
    p_pairs,
    p_places,
    p_tiles,
    p_num_tiles,
    num_pairs,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program places the rows of one expert."""
    i_expert = tl.program_id(0)
    o_pair = tl.arange(0, BLOCK)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    is_pair = o_pair < num_pairs
    b_expert = tl.load(p_experts + o_pair, mask=is_pair, other=-1)
    b_count = tl.histogram(tl.maximum(b_expert, 0), EXPERTS, mask=is_pair & (b_expert >= 0))
    row = _store_tiles(
        p_tiles, p_num_tiles, b_count, i_expert, max_tiles, NUM_EXPERTS, BLOCK_M, ALIGN
    )
    if i_expert == 0:
        tl.store(p_places + o_pair, b_expert, mask=is_pair & (b_expert < 0))
    o_own = i_expert + tl.arange(0, 1)
    _place(p_pairs, p_places, o_pair, b_expert, o_own, row + tl.zeros_like(o_own))


@triton.jit
def _store_tiles(
    p_tiles,
    p_num_tiles,
    b_count,
    i_expert,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Stores the tiles of one expert, of which each has so many rows. Returns its first row."""
    o_expert = tl.arange(0, b_count.shape[0])
    b_rows = (b_count + ALIGN - 1) // ALIGN * ALIGN
    b_tiles = (b_count + BLOCK_M - 1) // BLOCK_M
    count = tl.sum(tl.where(o_expert == i_expert, b_count, 0), 0)
    first_row = tl.sum(tl.where(o_expert < i_expert, b_rows, 0), 0)
    first_tile = tl.sum(tl.where(o_expert < i_expert, b_tiles, 0), 0)
    if i_expert == NUM_EXPERTS - 1:
        tl.store(p_num_tiles, first_tile + tl.cdiv(count, BLOCK_M))
    o_tile = tl.arange(0, 32)
    for start in range(0, tl.cdiv(count, BLOCK_M), 32):
        o_row = (start + o_tile) * BLOCK_M
        is_tile = o_row < count
        p_tile = p_tiles + first_tile + start + o_tile
        tl.store(p_tile, o_tile * 0 + i_expert, mask=is_tile)
        tl.store(p_tile + max_tiles, first_row + o_row, mask=is_tile)
        tl.store(p_tile + 2 * max_tiles, tl.minimum(count - o_row, BLOCK_M), mask=is_tile)
    return first_row


@triton.jit
def _place(p_pairs, p_places, o_pair, b_expert, o_expert, b_first):
    """Places pairs [P] of some experts [N] in rows from the first one of each on."""
    is_of = o_expert[:, None] == b_expert[None, :]
    b_row = b_first[:, None] + tl.cumsum(is_of.to(tl.int32), 1) - 1
    tl.store(p_pairs + b_row, tl.zeros_like(b_row) + o_pair[None, :], mask=is_of)
    tl.store(p_places + o_pair[None, :] + tl.zeros_like(b_row), b_row, mask=is_of)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs(
    p_experts,
    p_counts,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Stores the number of pairs of each expert in a segment, [segments, E]."""
    i_segment = tl.program_id(0)
    o_pair = i_segment * SEGMENT + tl.arange(0, SEGMENT)
    o_expert = tl.arange(0, EXPERTS)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    b_expert = tl.load(p_experts + o_pair, mask=o_pair < num_pairs, other=-1)
    b_count = tl.histogram(tl.maximum(b_expert, 0), EXPERTS, mask=b_expert >= 0)
    tl.store(p_counts + i_segment * NUM_EXPERTS + o_expert, b_count, mask=o_expert < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_segments", "max_tiles"])
def _cut_tiles(
    p_counts,
    p_first_rows,
    p_tiles,
    p_num_tiles,
    num_segments,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Stores the tiles of an expert, and its first row in each segment, [segments, E]."""
    i_expert = tl.program_id(0)
    o_segment = tl.arange(0, SEGMENTS)
    o_expert = tl.arange(0, EXPERTS)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    b_count = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_segments, SEGMENTS):
        is_count = (start + o_segment < num_segments)[:, None] & (o_expert < NUM_EXPERTS)[None, :]
        o_count = (start + o_segment)[:, None] * NUM_EXPERTS + o_expert[None, :]
        b_count += tl.sum(tl.load(p_counts + o_count, mask=is_count, other=0), 0)
    row = _store_tiles(
        p_tiles, p_num_tiles, b_count, i_expert, max_tiles, NUM_EXPERTS, BLOCK_M, ALIGN
    )
    for start in range(0, num_segments, SEGMENTS):
        is_segment = start + o_segment < num_segments
        o_count = (start + o_segment) * NUM_EXPERTS + i_expert
        b_own = tl.load(p_counts + o_count, mask=is_segment, other=0)
        tl.store(p_first_rows + o_count, row + tl.cumsum(b_own, 0) - b_own, mask=is_segment)
        row += tl.sum(b_own, 0)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_pairs(
    p_experts,
    p_first_rows,
    p_pairs,
    p_places,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    EXPERTS_AT_ONCE: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Places the pairs of a segment that are of some experts."""
    i_segment = tl.program_id(0)
    o_pair = i_segment * SEGMENT + tl.arange(0, SEGMENT)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    is_pair = o_pair < num_pairs
    b_expert = tl.load(p_experts + o_pair, mask=is_pair, other=-1)
    if tl.program_id(1) == 0:
        tl.store(p_places + o_pair, b_expert, mask=is_pair & (b_expert < 0))
    o_expert = tl.program_id(1) * EXPERTS_AT_ONCE + tl.arange(0, EXPERTS_AT_ONCE)
    p_first = p_first_rows + i_segment * NUM_EXPERTS + o_expert
    b_first = tl.load(p_first, mask=o_expert < NUM_EXPERTS, other=0)
    _place(p_pairs, p_places, o_pair, b_expert, o_expert, b_first)
