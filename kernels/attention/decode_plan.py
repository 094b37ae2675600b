"""Work items of decode attention, made on the device from sequence lengths and block tables.

A step's plan serves all its layers. Items are (row, split of 512 keys); splits whose blocks several
rows share become shared items, read once for up to `rows_per_tile` rows. Runs inside a CUDA graph:
sizes are fixed, counts are data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .decode_folds import MOST_ROWS, list_folds, num_programs, plan_folds
from .hopper_attention import ROWS, num_teams
from .online_softmax import SPLIT, first_keys

DIRECT_ROWS = 4
"""Largest number of rows for which programs find their split by arithmetic and load no work list
before the first key."""
FEW_ROWS = range(17, 65)
"""Numbers of rows whose splits `hopper_decode_splits` computes and beside whose merge the next
kernel starts: measured to be faster for these, and no faster for others
(docs/benchmarks/kernels.md, "Decode steps of some dozen rows")."""
_STRIPES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Preallocated for up to `max_rows` sequences of up to `max_splits` splits; filled by
    `plan_decode`."""

    max_rows: int
    max_splits: int
    rows_per_tile: int
    """Number of sequences that read a shared split at once."""
    counts: torch.Tensor
    """int32 [4]: whole items, tail items, shared items, tickets drawn by programs that look for
    their next item."""
    items: torch.Tensor
    """int32 [max_rows * max_splits]: row << 16 | split, whole splits that one row reads."""
    tails: torch.Tensor
    """int32 [max_rows]: the same for last splits that are not whole; they follow the whole ones,
    the longest first."""
    shared_splits: torch.Tensor
    """int32 [max_rows * max_splits / 2]: the split of each shared item."""
    shared_rows: torch.Tensor
    """int32 [as above, rows_per_tile]: rows of each shared item; negative entries pad the end."""
    first_partials: torch.Tensor
    """int32 [max_rows]: index of a row's first partial result; the splits of a row follow one
    another."""
    arrived: torch.Tensor
    """int32 [max_rows * Hk]: number of finished splits of a row and head whose splits are merged by
    the last of them."""
    partial_acc: torch.Tensor
    """float32 [partials, Hq, D]"""
    partial_ml: torch.Tensor
    """float32 [partials, Hq, 2]: maximum and sum."""
    folded: torch.Tensor | None = None
    """int32 [max_rows], where programs fold: number of first splits of a row that one program
    computes. It stores their merged state as the row's first partial result, or the row's attention
    if these are all of its splits."""

    @property
    def is_direct(self) -> bool:
        """Whether decode needs no work list: `plan_decode` may be left out if nothing is shared."""
        return self.max_rows <= DIRECT_ROWS

    @classmethod
    def allocate(
        cls,
        *,
        max_rows: int,
        max_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        max_partials: int | None = None,
        fold: bool = False,
    ) -> DecodePlan:
        """max_partials bounds the splits of all rows together; by default the worst case, max_rows
        whole contexts. With `fold`, programs fold a row's first splits, where a plan has a work
        list and at most MOST_ROWS rows: for rows with neither shared splits nor windows."""
        max_splits = triton.cdiv(max_seq_len, SPLIT)
        partials = max_rows * max_splits if max_partials is None else max_partials
        rows_per_tile = num_teams(device) * (ROWS // (num_q_heads // num_kv_heads))
        max_shared = max(max_rows * max_splits // 2, 1)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            max_rows=max_rows,
            max_splits=max_splits,
            rows_per_tile=rows_per_tile,
            counts=ints(4),
            items=ints(max_rows * max_splits),
            tails=ints(max_rows),
            shared_splits=ints(max_shared),
            shared_rows=ints(max_shared, rows_per_tile).fill_(-1),
            first_partials=ints(max_rows),
            arrived=ints(max_rows * num_kv_heads),
            partial_acc=torch.zeros(
                partials, num_q_heads, head_dim, dtype=torch.float32, device=device
            ),
            partial_ml=torch.zeros(partials, num_q_heads, 2, dtype=torch.float32, device=device),
            folded=ints(max_rows) if fold and DIRECT_ROWS < max_rows <= MOST_ROWS else None,
        )

    def without_folds(self) -> DecodePlan:
        """The same plan for rows that share splits or have windows."""
        return replace(self, folded=None)

    def beside(self) -> DecodePlan:
        """Plan for other rows of the same step. Their attention comes after this one's in the same
        layer or in another, so it writes partial results to the same place."""
        own = {"counts", "items", "tails", "shared_splits", "shared_rows", "first_partials"}
        own |= {"folded"} if self.folded is not None else set()
        return replace(self, **{name: getattr(self, name).clone() for name in own})


def plan_decode(
    plan: DecodePlan,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    *,
    share: bool,
    min_sharers: int = 2,
    window: int = 0,
) -> None:
    """Fills the plan. seq_lens int32 [R]: keys that a row reads, its own included, 0 for a padding
    row; table_rows int32 [R]: the row of block_tables int32 [rows, max_blocks] that belongs to each
    row. With `share`, splits are compared for blocks in common. A row sees the last `window` keys,
    or all, or with a negative one those of its chunk of −window positions: splits before these get
    no item. Rows with windows share nothing, since a split is seldom inside the windows of all of
    them."""
    num_rows = len(seq_lens)
    assert num_rows <= plan.max_rows
    assert not (share and window)
    plan.counts.zero_()
    if plan.folded is not None:
        assert not share
        assert not window
        few = num_rows in FEW_ROWS
        num_kv_heads = len(plan.arrived) // plan.max_rows
        programs = num_programs(seq_lens.device, few=few)
        plan_folds(
            seq_lens, plan.folded, num_kv_heads=num_kv_heads, num_programs=programs, walks_list=few
        )
        list_folds(seq_lens, plan.folded, plan.counts, plan.items, plan.tails, plan.first_partials)
        return
    _plan_decode[(num_rows, _STRIPES)](
        seq_lens,
        table_rows,
        block_tables,
        block_tables.stride(0),
        plan.counts,
        plan.items,
        plan.tails,
        plan.shared_splits,
        plan.shared_rows,
        plan.first_partials,
        num_rows,
        min_sharers,
        PAGES=SPLIT // block_size,
        SPLIT=SPLIT,
        ROWS_PER_TILE=plan.rows_per_tile,
        BLOCK_R=triton.next_power_of_2(max(num_rows, plan.rows_per_tile)),
        WINDOW=window,
        SHARE=share and num_rows > 1,
        num_warps=4,
    )


@triton.jit
def _same_blocks(
    p_table, stride_table, b_table_row, b_candidate, own_row, first_page, PAGES: tl.constexpr
):
    """Rows that may share this row's split: they have the same blocks in all of its pages. The last
    page alone rules most of them out."""
    last = first_page + PAGES - 1
    own_last = tl.load(p_table + own_row * stride_table + last)
    b_last = tl.load(p_table + b_table_row * stride_table + last, mask=b_candidate, other=-1)
    b_same = b_candidate & (b_last == own_last)
    if tl.sum(b_same.to(tl.int32), axis=0) > 1:
        for i_page in range(first_page, last):
            own = tl.load(p_table + own_row * stride_table + i_page)
            b_other = tl.load(p_table + b_table_row * stride_table + i_page, mask=b_same, other=-1)
            b_same = b_same & (b_other == own)
    return b_same


@triton.jit(do_not_specialize=["num_rows"])
def _plan_decode(
    p_seq_len,
    p_table_row,
    p_table,
    stride_table,
    p_count,
    p_item,
    p_tail,
    p_shared_split,
    p_shared_row,
    p_first_partial,
    num_rows,
    min_sharers,
    PAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARE: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_r = tl.arange(0, BLOCK_R)
    b_len = tl.load(p_seq_len + o_r, mask=o_r < num_rows, other=0)
    seq_len = tl.load(p_seq_len + i_row)
    num_whole = seq_len // SPLIT
    if tl.program_id(1) == 0:
        b_splits = tl.where(o_r < i_row, (b_len + SPLIT - 1) // SPLIT, 0)
        tl.store(p_first_partial + i_row, tl.sum(b_splits, axis=0))
        own_tail = seq_len % SPLIT
        b_tail = b_len % SPLIT
        if own_tail != 0:
            # The shortest last, so that programs end together.
            is_before = (b_tail > own_tail) | ((b_tail == own_tail) & (o_r < i_row))
            tl.store(p_tail + tl.sum(is_before.to(tl.int32), axis=0), (i_row << 16) | num_whole)
            tl.atomic_add(p_count + 1, 1)
    b_table_row = tl.load(p_table_row + o_r, mask=o_r < num_rows, other=0).to(tl.int64)
    own_row = tl.load(p_table_row + i_row).to(tl.int64)
    first, _ = first_keys(0, seq_len, WINDOW, SPLIT)
    for i_split in range(first // SPLIT + tl.program_id(1), num_whole, tl.num_programs(1)):
        alone = True
        if SHARE:
            b_candidate = b_len >= (i_split + 1) * SPLIT
            b_same = _same_blocks(
                p_table, stride_table, b_table_row, b_candidate, own_row, i_split * PAGES, PAGES
            )
            num_sharers = tl.sum(b_same.to(tl.int32), axis=0)
            alone = num_sharers < min_sharers
            leader = tl.min(tl.where(b_same, o_r, BLOCK_R), axis=0)
            if (num_sharers >= min_sharers) & (leader == i_row):
                num_tiles = (num_sharers + ROWS_PER_TILE - 1) // ROWS_PER_TILE
                first = tl.atomic_add(p_count + 2, num_tiles)
                b_rank = tl.cumsum(b_same.to(tl.int32), axis=0) - 1
                tl.store(p_shared_row + first * ROWS_PER_TILE + b_rank, o_r, mask=b_same)
                # NOTE: rows past the last sharer of the last tile must read as none.
                b_blank = num_sharers + o_r
                is_blank = b_blank < num_tiles * ROWS_PER_TILE
                tl.store(
                    p_shared_row + first * ROWS_PER_TILE + b_blank,
                    -1,
                    mask=is_blank & (o_r < ROWS_PER_TILE),
                )
                tl.store(p_shared_split + first + o_r, i_split, mask=o_r < num_tiles)
        if alone:
            tl.store(p_item + tl.atomic_add(p_count, 1), (i_row << 16) | i_split)
