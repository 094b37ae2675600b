"""First splits of a row that one program folds in registers, chosen on the device from sequence
lengths.

`reduce_splits` merges the splits of a row first to last, ((s0 + s1) + s2) + …, so a program that
computes s0 … sk in this order has the bits of the merge after sk, and stores that one state. Later
splits cannot be folded among themselves: a merge rounds, and s0 + (s1 + s2) has other bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.device import num_multiprocessors
from .online_softmax import SPLIT, TILE, fresh_state, merge_states

RESIDENT_PROGRAMS = 3
RESIDENT_PROGRAMS_OF_FEW = 2
"""Number of programs of a multiprocessor in `decode_attention`, and in `hopper_decode_splits`."""
MOST_ROWS = 1 << 12
"""Plans of more rows fold nothing."""
_LEAST_ROWS = 64
"""Number of rows up to which plans are made by the same kernels, which are no slower with so
many."""


def num_programs(device: torch.device, *, few: bool) -> int:
    """Number of programs that share the work of many rows. `few`: of `hopper_decode_splits`."""
    return (RESIDENT_PROGRAMS_OF_FEW if few else RESIDENT_PROGRAMS) * num_multiprocessors(device)


def plan_folds(
    seq_lens: torch.Tensor,
    folded: torch.Tensor,
    *,
    num_kv_heads: int,
    num_programs: int,
    walks_list: bool,
) -> None:
    """Writes folded int32 [R]: number of first splits of each row that one program computes, 1
    where it folds none.

    Rows are taken in waves, the longest first: a wave gives each program one row and head. The
    folds of all waves together are no longer than a program's share of the work, so that single
    splits, which follow, fill the shares up. `walks_list`: programs walk a fixed list, as those of
    `hopper_decode_splits`, and do not even out what a wave gives them: its folds are as long as the
    shortest row, and a wave that leaves many of them without a fold is not taken."""
    num_rows = len(seq_lens)
    assert num_rows <= MOST_ROWS
    _plan_folds[(1,)](
        seq_lens,
        folded,
        num_rows,
        num_programs,
        NUM_KV_HEADS=num_kv_heads,
        SPLIT=SPLIT,
        TILE=TILE,
        BLOCK_R=_block_of(num_rows),
        ROW_BITS=MOST_ROWS.bit_length() - 1,
        WALKS_LIST=walks_list,
        num_warps=4,
    )


def list_folds(
    seq_lens: torch.Tensor,
    folded: torch.Tensor,
    counts: torch.Tensor,
    items: torch.Tensor,
    tails: torch.Tensor,
    first_partials: torch.Tensor,
) -> None:
    """Fills these lists of a `DecodePlan` whose counts are zero. Split 0 of a row stands for all
    that are folded; folds come first, the longest before others, then whole splits by row."""
    num_rows = len(seq_lens)
    _list_folds[(num_rows,)](
        seq_lens,
        folded,
        counts,
        items,
        tails,
        first_partials,
        num_rows,
        SPLIT=SPLIT,
        BLOCK_R=_block_of(num_rows),
        num_warps=4,
    )


def _block_of(num_rows: int) -> int:
    return max(int(triton.next_power_of_2(num_rows)), _LEAST_ROWS)


@triton.jit(do_not_specialize=["num_rows"])
def _plan_folds(
    p_seq_len,
    p_folded,
    num_rows,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROW_BITS: tl.constexpr,
    WALKS_LIST: tl.constexpr,
):
    PER_SPLIT: tl.constexpr = SPLIT // TILE
    o_r = tl.arange(0, BLOCK_R)
    b_len = tl.load(p_seq_len + o_r, mask=o_r < num_rows, other=0)
    b_tiles = (b_len + TILE - 1) // TILE
    budget = tl.sum(b_tiles, axis=0) * NUM_KV_HEADS // num_programs
    # Rows by length; of equal lengths in their own order.
    b_key = tl.sort((b_tiles << ROW_BITS) | ((1 << ROW_BITS) - 1 - o_r), descending=True)
    b_tiles = b_key >> ROW_BITS
    b_row = (1 << ROW_BITS) - 1 - (b_key & ((1 << ROW_BITS) - 1))
    b_splits = (b_tiles + PER_SPLIT - 1) // PER_SPLIT
    num_long = tl.sum((b_splits > 1).to(tl.int32), axis=0)
    num_rows_at_once = num_programs // NUM_KV_HEADS
    least = num_rows_at_once * 7 // 8 if WALKS_LIST else 1
    b_folded = tl.full((BLOCK_R,), 1, tl.int32)
    for first in range(0, num_long, tl.maximum(num_rows_at_once, 1)):
        end = tl.minimum(first + num_rows_at_once, num_long)
        longest = tl.max(tl.where(o_r == first, b_tiles, 0), axis=0)
        most = tl.max(tl.where(o_r == (end - 1 if WALKS_LIST else first), b_splits, 0), axis=0)
        most = tl.where(tl.minimum(longest, most * PER_SPLIT) <= budget, most, budget // PER_SPLIT)
        if (most > 1) & (end - first >= least):
            b_folded = tl.where((o_r >= first) & (o_r < end), tl.minimum(b_splits, most), b_folded)
            budget -= tl.minimum(longest, most * PER_SPLIT)
    tl.store(p_folded + b_row, b_folded, mask=b_row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _list_folds(
    p_seq_len,
    p_folded,
    p_count,
    p_item,
    p_tail,
    p_first_partial,
    num_rows,
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_r = tl.arange(0, BLOCK_R)
    b_len = tl.load(p_seq_len + o_r, mask=o_r < num_rows, other=0)
    b_folded = tl.load(p_folded + o_r, mask=o_r < num_rows, other=1)
    seq_len = tl.load(p_seq_len + i_row)
    folded = tl.load(p_folded + i_row)
    b_splits = tl.where(o_r < i_row, (b_len + SPLIT - 1) // SPLIT, 0)
    tl.store(p_first_partial + i_row, tl.sum(b_splits, axis=0))

    # Splits from this one on are items of their own.
    b_first = tl.where(b_folded > 1, b_folded, 0)
    first = tl.where(folded > 1, folded, 0)
    b_single = tl.maximum(b_len // SPLIT - b_first, 0)
    num_folds = tl.sum((b_folded > 1).to(tl.int32), axis=0)
    if i_row == 0:
        tl.store(p_count, num_folds + tl.sum(b_single, axis=0))
    if folded > 1:
        is_before = (b_folded > folded) | ((b_folded == folded) & (o_r < i_row))
        tl.store(p_item + tl.sum(is_before.to(tl.int32), axis=0), i_row << 16)
    place = num_folds + tl.sum(tl.where(o_r < i_row, b_single, 0), axis=0)
    num_whole = seq_len // SPLIT
    for i_split in range(first, num_whole):
        tl.store(p_item + place + i_split - first, (i_row << 16) | i_split)

    b_tail = tl.where(b_first <= b_len // SPLIT, b_len % SPLIT, 0)
    own_tail = tl.where(first <= num_whole, seq_len % SPLIT, 0)
    if own_tail != 0:
        # The shortest last, so that programs end together.
        is_before = (b_tail > own_tail) | ((b_tail == own_tail) & (o_r < i_row))
        tl.store(p_tail + tl.sum(is_before.to(tl.int32), axis=0), (i_row << 16) | num_whole)
        tl.atomic_add(p_count + 1, 1)


@triton.jit
def fresh_fold(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, FP8: tl.constexpr):
    """State of folded splits where none is yet: maxima, sums [ROWS], weighted values in parts."""
    b_m, _, b_acc = fresh_state(ROWS, HEAD_DIM, FP8)
    return b_m, tl.zeros((ROWS,), tl.float32), b_acc


@triton.jit
def _row_sums(b_l):
    """`online_softmax.row_sums`, as sums of pairs: in a loop over tiles the compiler would bring
    every tile's sums into the layout that its folds need."""
    ROWS: tl.constexpr = b_l.shape[0]
    b_l = tl.sum(tl.reshape(b_l, (ROWS, 2, 8)), axis=1)
    b_l = tl.sum(tl.reshape(b_l, (ROWS, 2, 4)), axis=1)
    b_l = tl.sum(tl.reshape(b_l, (ROWS, 2, 2)), axis=1)
    return tl.sum(b_l, axis=1)


@triton.jit
def fold_split(
    fold,
    i_n,
    first,
    b_m,
    b_l,
    b_acc,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FP8: tl.constexpr,
):
    """Merges the state of a split into that of the ones before it where position i_n begins another
    split; returns both states."""
    if (i_n > first) & (i_n % SPLIT == 0):
        b_sum = _row_sums(b_l)
        b_m_new, b_sum_new, b_left = merge_states(
            fold[0], fold[1], fold[2][0], b_m, b_sum, b_acc[0]
        )
        if FP8:
            fold = (
                b_m_new,
                b_sum_new,
                (b_left, merge_states(fold[0], fold[1], fold[2][1], b_m, b_sum, b_acc[1])[2]),
            )
        else:
            fold = (b_m_new, b_sum_new, (b_left,))
        b_m, b_l, b_acc = fresh_state(b_m.shape[0], HEAD_DIM, FP8)
    return fold, b_m, b_l, b_acc


@triton.jit
def num_keys(p_folded, i_row, i_split, SPLIT: tl.constexpr):
    """Number of keys of an item that begins with i_split, if the row has so many: the first split
    of a row stands for all that are folded."""
    return (
        SPLIT if p_folded is None else tl.load(p_folded + i_row, mask=i_split == 0, other=1) * SPLIT
    )
