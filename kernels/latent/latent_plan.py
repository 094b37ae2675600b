"""Division of decode attention over latents among programs: each gets as many splits as the others,
one after another.

A row's splits are merged first to last, so a program that has a row's first splits merges them as
it goes and leaves one partial result; each later split leaves its own, for `reduce_splits`. The
plan is made on the device from the lengths of a step and serves all of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ..attention.online_softmax import SPLIT
from ..launch.device import num_multiprocessors

ROWS = 64
"""Query rows of a program, tokens times heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPlan:
    """Preallocated for up to `max_rows` rows of up to `max_splits` splits; filled by
    `plan_latents`."""

    max_rows: int
    max_splits: int
    num_ranges: int
    """Number of parts into which all splits are divided."""
    counts: torch.Tensor
    """int32 [4], of no use here; see `DecodePlan`."""
    range_starts: torch.Tensor
    """int32 [num_ranges + 1]: first split of each range, and the number of all splits."""
    row_of_split: torch.Tensor
    """int32 [max_rows * max_splits]: row of each split, rows one after another."""
    first_partials: torch.Tensor
    """int32 [max_rows]: place of a row's first split among all, and of its first partial result."""
    folded: torch.Tensor
    """int32 [max_rows]: number of first splits of a row that one program merges."""
    totals: torch.Tensor
    """float32 [programs * ROWS, rank]: merged splits that wait for the next one of a program."""
    partial_acc: torch.Tensor
    """float32 [partials, Hq, rank]"""
    partial_ml: torch.Tensor
    """float32 [partials, Hq, 2]: maximum and sum."""
    is_direct: bool = False
    """See `DecodePlan`."""

    @classmethod
    def allocate(
        cls,
        *,
        max_rows: int,
        max_seq_len: int,
        num_heads: int,
        rank: int,
        device: torch.device,
        max_partials: int | None = None,
        num_ranges: int | None = None,
    ) -> LatentPlan:
        """Where all rows together have more splits than `max_partials`, by default the worst case,
        programs compute whole rows. num_ranges is by default as many as programs run at once."""
        max_splits = triton.cdiv(max_seq_len, SPLIT)
        partials = max_rows * max_splits if max_partials is None else max_partials
        tiles_of_heads = triton.cdiv(num_heads, ROWS)
        num_ranges = num_ranges or max(num_multiprocessors(device) // tiles_of_heads, 1)

        def ints(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            max_rows=max_rows,
            max_splits=max_splits,
            num_ranges=num_ranges,
            counts=ints(4),
            range_starts=ints(num_ranges + 1),
            row_of_split=ints(max_rows * max_splits),
            first_partials=ints(max_rows),
            folded=ints(max_rows),
            totals=floats(num_ranges * tiles_of_heads * ROWS, rank),
            partial_acc=floats(partials, num_heads, rank),
            partial_ml=floats(partials, num_heads, 2),
        )

    def beside(self) -> LatentPlan:
        """Plan for other rows of the same step, whose attention comes after this one's: it writes
        partial results to the same place."""
        own = ("counts", "range_starts", "row_of_split", "first_partials", "folded")
        return replace(self, **{name: getattr(self, name).clone() for name in own})


def plan_latents(plan: LatentPlan, seq_lens: torch.Tensor) -> None:
    """Fills the plan. seq_lens int32 [R]: keys that a row reads, its own included, 0 for a padding
    row."""
    num_rows = len(seq_lens)
    assert num_rows <= plan.max_rows
    _plan_latents[(num_rows,)](
        seq_lens,
        plan.range_starts,
        plan.row_of_split,
        plan.first_partials,
        plan.folded,
        num_rows,
        plan.num_ranges,
        len(plan.partial_acc),
        SPLIT=SPLIT,
        BLOCK_R=triton.next_power_of_2(max(plan.max_rows, plan.num_ranges + 1)),
        BLOCK_S=64,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows", "num_ranges", "max_partials"])
def _plan_latents(
    p_seq_len,
    p_start,
    p_row,
    p_first,
    p_folded,
    num_rows,
    num_ranges,
    max_partials,
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_r = tl.arange(0, BLOCK_R)
    b_len = tl.load(p_seq_len + o_r, mask=o_r < num_rows, other=0)
    b_splits = (b_len + SPLIT - 1) // SPLIT
    num_all = tl.sum(b_splits, axis=0)
    num_splits = (tl.load(p_seq_len + i_row) + SPLIT - 1) // SPLIT
    first = tl.sum(tl.where(o_r < i_row, b_splits, 0), axis=0)
    # Ranges are whole rows, and nothing is left to merge, where the longest row is at most an
    # eighth longer than an equal share, and where partial results would have no room.
    is_even = tl.max(b_splits, axis=0) * num_ranges * 8 <= num_all * 9
    takes_rows = (is_even & (num_rows <= num_ranges)) | (num_all > max_partials)
    if takes_rows:
        i_range = (i_row * num_ranges + num_rows - 1) // num_rows
        if num_rows <= num_ranges:
            i_range = i_row
        is_start = (num_rows <= num_ranges) | (i_range * num_rows // num_ranges == i_row)
        tl.store(p_start + i_range, first, mask=is_start)
    if i_row == 0:
        b_start = tl.where(takes_rows, num_all, range_start(o_r, num_all, num_ranges))
        is_known = takes_rows & (o_r < tl.minimum(num_rows, num_ranges))
        tl.store(p_start + o_r, b_start, mask=(o_r <= num_ranges) & (is_known == 0))
    tl.store(p_first + i_row, first)
    # The range that the first split lies in is the last one that begins before its end.
    i_range = ((first + 1) * num_ranges - 1) // tl.maximum(num_all, 1)
    end = range_start(i_range + 1, num_all, num_ranges)
    num_folded = tl.where(takes_rows, num_splits, tl.minimum(num_splits, end - first))
    tl.store(p_folded + i_row, tl.maximum(num_folded, 1))
    for i_first in range(0, num_splits, BLOCK_S):
        o_s = i_first + tl.arange(0, BLOCK_S)
        b_row = tl.full((BLOCK_S,), 0, tl.int32) + i_row
        tl.store(p_row + first + o_s, b_row, mask=o_s < num_splits)


@triton.jit
def range_start(i_range, num_all, num_ranges):
    """First split of a range of equal ones; a range ends where the next one starts."""
    return (i_range.to(tl.int64) * num_all // num_ranges).to(tl.int32)
