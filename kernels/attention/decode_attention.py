"""Attention of one new token a sequence over its paged keys and values: splits of 512 keys, merged
first to last.

The heads of a group share one read of their keys. Work items come from `decode_plan`; splits that
several rows share are read by `shared_prefix_attention` into the same partial results, so sharing
changes no bit. With a sliding window, tiles before it are not read: they would leave a row's state
as it is, to the bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from ..launch.device import num_multiprocessors
from .decode_folds import fold_split, fresh_fold, num_keys
from .decode_plan import DecodePlan
from .online_softmax import (
    attend_tile,
    base_2_scale,
    finish,
    first_keys,
    fresh_state,
    joined,
    merge_states,
    parts_of,
    row_sums,
    stages_of,
    with_sinks,
)
from .paged_cache import as_pairs, attention_constants, head_bytes, is_paired, load_tile, pages_of

MAX_PROGRAMS = 8448
"""Number of programs for rows whose splits are found by arithmetic; further items are walked in
strides."""
NUM_STAGES = 2
NUM_STAGES_FP8 = 3
MAX_REGISTERS = 168
RESIDENT_PROGRAMS = 3
"""Number of programs that fit on a multiprocessor, by registers and shared memory. No more are
launched. Programs draw one item after another, so that all end at about the same time and none is
launched for nothing, however many splits rows might have."""


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dependent: bool = False,
) -> None:
    """Attention of q [R, Hq, D] into out of the same shape; caches [num_blocks, Hk, block_size, D];
    the other arguments as in `plan_decode`.

    k_scale and v_scale float32 [Hk] for fp8 caches. scale is that of the softmax, 1 / sqrt(D) by
    default; window as in `plan_decode`. Sinks float32 [Hq] are scores of keys whose values are
    zeros. Scores are capped by tanh to `softcap`; 0: not. Rows whose length is 0 are left alone.
    `reduce_splits`
    follows.
    """
    num_rows, _, head_dim = q.shape
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert plan.folded is None or not window
    stride_block, stride_head, stride_slot, _ = as_pairs(k_cache).stride()
    _decode_splits[(_num_programs(plan, num_rows, k_cache),)](
        q,
        as_pairs(k_cache),
        as_pairs(v_cache),
        block_tables,
        table_rows,
        seq_lens,
        *(plan.counts, plan.items, plan.tails),
        *(plan.first_partials, plan.folded, plan.partial_acc, plan.partial_ml),
        out,
        seq_lens if k_scale is None else k_scale,
        seq_lens if v_scale is None else v_scale,
        sinks,
        base_2_scale(scale, head_dim),
        stride_block,
        stride_head,
        block_tables.stride(0),
        num_rows,
        stride_slot=stride_slot,
        **attention_constants(q, k_cache),
        MAX_SPLITS=plan.max_splits,
        WINDOW=window,
        SOFTCAP=softcap,
        DIRECT=plan.is_direct,
        DEPENDENT=dependent,
        num_warps=4,
        num_stages=stages_of(
            NUM_STAGES_FP8 if is_paired(k_cache) else NUM_STAGES, head_bytes(q, k_cache)
        ),
        maxnreg=MAX_REGISTERS,
        **launch_options(dependent),
    )


def _num_programs(plan: DecodePlan, num_rows: int, k_cache: torch.Tensor) -> int:
    most = (
        MAX_PROGRAMS if plan.is_direct else RESIDENT_PROGRAMS * num_multiprocessors(k_cache.device)
    )
    return min(num_rows * plan.max_splits * k_cache.shape[1], most)


def decode_attention_twin(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Attention in plain torch, one row after another, in q's precision or float32, whichever is
    higher; caches already unscaled. Options as in `attention_of_rows`."""
    caches = (k_cache, v_cache)
    tables = [block_tables[int(row)] for row in table_rows]
    rows = [
        attention_of_rows(q[i : i + 1], *caches, tables[i], int(seq_lens[i]), **options)[0]
        for i in range(len(q))
    ]
    return torch.stack(rows)


def attention_of_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_len: int,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last len(q) positions of one sequence with seq_len keys, [C, Hq, D]. Each
    position attends to the last `window` keys up to its own, to all with 0, or with a negative one
    to those of its chunk of −window positions. `softcap`: scores become softcap * tanh(score /
    softcap); 0: unchanged. Sinks [Hq] are scores of keys whose values are zeros."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    blocks = block_table[: triton.cdiv(seq_len, k_cache.shape[2])].long()
    k, v = (c[blocks].transpose(1, 2).flatten(0, 1)[:seq_len].to(dtype) for c in (k_cache, v_cache))
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("chgd,nhd->hgcn", grouped, k) * (scale or 1 / math.sqrt(q.shape[2]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(seq_len, device=q.device)
    own = keys[seq_len - len(q) :, None]
    oldest = own // -window * -window if window < 0 else own - (window or seq_len) + 1
    hidden = (keys > own) | (keys < oldest)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        of_heads = sinks.to(dtype).view(k.shape[1], -1, 1, 1)
        scores = torch.cat((scores, of_heads.expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :seq_len]
    return torch.einsum("hgcn,nhd->chgd", weights, v).flatten(1, 2)


@triton.jit(do_not_specialize=["num_rows"])
def _decode_splits(
    p_q,
    p_k,
    p_v,
    p_table,
    p_table_row,
    p_seq_len,
    p_count,
    p_item,
    p_tail,
    p_first_partial,
    p_folded,
    p_partial_acc,
    p_partial_ml,
    p_out,
    p_k_scale,
    p_v_scale,
    p_sinks,
    qk_scale,
    stride_block,
    stride_head,
    stride_table,
    num_rows,
    stride_slot: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    FP8: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIRECT: tl.constexpr,
    ON_GPU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    ROWS: tl.constexpr = 16
    tl.static_assert(GROUP <= ROWS)
    shape: tl.constexpr = (
        SPLIT,
        TILE,
        HALF,
        PAGE,
        HEAD_DIM,
        BLOCK_ROWS,
        stride_slot,
        WINDOW,
        FP8,
        ON_GPU,
        SOFTCAP,
    )
    o_h = tl.arange(0, ROWS)
    o_d = tl.arange(0, HEAD_DIM)
    is_head = o_h < GROUP
    num_whole, num_items = _num_items(p_count, num_rows * MAX_SPLITS, DIRECT)
    lists = (p_item, p_tail, num_whole, num_items)
    rows = (p_seq_len, p_table_row, p_first_partial, p_folded)
    # Heads of one split run beside one another: their keys lie together. The next item and the
    # first keys that it reads are looked up while this one is computed.
    i_task = tl.program_id(0)
    i_next = i_task + tl.num_programs(0)
    item = _ask_for_item(lists, i_task // NUM_KV_HEADS, DIRECT)
    i_row, i_split = _split_of(lists, i_task // NUM_KV_HEADS, item, MAX_SPLITS, DIRECT)
    seq_len, table_row, first_partial, item_keys = _facts(
        rows, i_row, i_split, MAX_SPLITS, SPLIT, DIRECT
    )
    p_row = p_table + table_row.to(tl.int64) * stride_table
    pages = _first_pages(p_row, i_split * SPLIT, item_keys, seq_len, shape)
    # Lengths and lists are older than the kernel before this one, queries and the newest keys are
    # not.
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    o_q = _query_offsets(i_row, i_task % NUM_KV_HEADS, o_h, o_d, NUM_KV_HEADS, GROUP, HEAD_DIM)
    b_q = tl.load(p_q + o_q, mask=is_head[:, None], other=0.0)
    while i_task < num_items * NUM_KV_HEADS:
        i_kv = i_task % NUM_KV_HEADS
        scale, v_scale = _scales(p_k_scale, p_v_scale, i_kv, qk_scale, FP8)
        first, oldest = first_keys(i_split * SPLIT, seq_len, WINDOW, TILE)
        end = tl.minimum(i_split * SPLIT + item_keys, seq_len)
        item = _ask_for_item(lists, i_next // NUM_KV_HEADS, DIRECT)
        b_parts = parts_of(b_q, FP8)
        keys_of = (p_k, p_v, p_row, pages, first, end, oldest, i_kv, stride_block, stride_head)
        # A single split has a loop without the state of folded ones, which takes registers: in one
        # loop 256 rows of 300 keys took 1.5 % longer (2026-11-27).
        if p_folded is None:
            b_m, b_sum, b_acc = _attend_item(b_parts, keys_of, scale, shape, False)
        elif item_keys > SPLIT:
            b_m, b_sum, b_acc = _attend_item(b_parts, keys_of, scale, shape, True)
        else:
            b_m, b_sum, b_acc = _attend_item(b_parts, keys_of, scale, shape, False)
        next_row, next_split = _split_of(lists, i_next // NUM_KV_HEADS, item, MAX_SPLITS, DIRECT)
        next_len, table_row, next_partial, item_keys = _facts(
            rows, next_row, next_split, MAX_SPLITS, SPLIT, DIRECT
        )
        o_q_next = _query_offsets(
            next_row, i_next % NUM_KV_HEADS, o_h, o_d, NUM_KV_HEADS, GROUP, HEAD_DIM
        )
        b_q = tl.load(p_q + o_q_next, mask=is_head[:, None], other=0.0)

        # NOTE: the last condition always holds. Without it, and with one key head, nothing in the
        # loop reads the task, and a pass of Triton 3.6 (RemoveLayoutConversions) fails on a loop
        # with fewer results than state.
        is_stored = is_head & (first < end) & (i_task >= 0)
        if seq_len <= SPLIT if p_folded is None else (i_split == 0) & (end == seq_len):
            b_sum = with_sinks(b_m, b_sum, p_sinks, i_kv * GROUP + o_h, is_head)
            tl.store(
                p_out + o_q,
                finish(b_sum, b_acc, v_scale).to(p_out.dtype.element_ty),
                mask=is_stored[:, None],
            )
        else:
            o_partial = (
                (first_partial + i_split).to(tl.int64) * (NUM_KV_HEADS * GROUP) + i_kv * GROUP + o_h
            )
            _store_partial(
                p_partial_acc, p_partial_ml, o_partial, o_d, b_m, b_sum, b_acc, is_stored, HEAD_DIM
            )
        p_row = p_table + table_row.to(tl.int64) * stride_table
        pages = _first_pages(p_row, next_split * SPLIT, item_keys, next_len, shape)
        i_split = next_split
        seq_len = next_len
        first_partial = next_partial
        o_q = o_q_next
        i_task = i_next
        i_next = _task_after(p_count, i_next, DIRECT)


@triton.jit
def _attend_item(b_q, keys_of, scale, shape: tl.constexpr, FOLDS: tl.constexpr):
    """State after an item's keys: maxima and sums [ROWS], weighted values [ROWS, D]. FOLDS: the
    item has several splits."""
    p_k, p_v, p_row, pages, first, end, oldest, i_kv, stride_block, stride_head = keys_of
    SPLIT: tl.constexpr = shape[0]
    TILE: tl.constexpr = shape[1]
    HALF: tl.constexpr = shape[2]
    PAGE: tl.constexpr = shape[3]
    HEAD_DIM: tl.constexpr = shape[4]
    FP8: tl.constexpr = shape[8]
    ROWS: tl.constexpr = b_q[0].shape[0]
    cache = (p_k, p_v, p_row, i_kv, stride_block, stride_head, shape[6])
    tiles: tl.constexpr = (shape[5], HEAD_DIM, PAGE, HALF, False, FP8)
    b_m, b_l, b_acc = fresh_state(ROWS, HEAD_DIM, FP8)
    if FOLDS:
        fold = fresh_fold(ROWS, HEAD_DIM, FP8)
    for i_n in range(first, end, TILE):
        if FOLDS:
            fold, b_m, b_l, b_acc = fold_split(
                fold, i_n, first, b_m, b_l, b_acc, SPLIT, HEAD_DIM, FP8
            )
        keys, values = load_tile(cache, pages, i_n, end, tiles, shape[9])
        pages = pages_of(p_row, i_n + TILE, end, PAGE, HALF)
        visible = _visible(i_n, oldest, end, shape[7], HALF)
        b_m, b_l, b_acc = attend_tile(
            b_q, keys, values, visible, scale, b_m, b_l, b_acc, True, shape[10]
        )
    b_sum = tl.where(first < end, row_sums(b_l), 1.0)
    b_whole = joined(b_acc)
    if FOLDS:
        b_m, b_sum, b_whole = merge_states(fold[0], fold[1], joined(fold[2]), b_m, b_sum, b_whole)
    return b_m, b_sum, b_whole


@triton.jit
def _visible(first, oldest, end, WINDOW: tl.constexpr, HALF: tl.constexpr):
    """Visibility of the keys of both halves of a tile."""
    o_n = first + tl.arange(0, HALF)[None, :]
    left = o_n < end
    right = o_n + HALF < end
    if WINDOW:
        left = left & (o_n >= oldest)
        right = right & (o_n + HALF >= oldest)
    return left, right


@triton.jit
def _query_offsets(
    i_row, i_kv, o_h, o_d, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr
):
    return (i_row * (NUM_KV_HEADS * GROUP) + i_kv * GROUP + o_h)[:, None] * HEAD_DIM + o_d[None, :]


@triton.jit
def _store_partial(
    p_acc, p_ml, o_partial, o_d, b_m, b_sum, b_acc, is_stored, HEAD_DIM: tl.constexpr
):
    tl.store(p_acc + o_partial[:, None] * HEAD_DIM + o_d[None, :], b_acc, mask=is_stored[:, None])
    tl.store(p_ml + o_partial * 2, b_m, mask=is_stored)
    tl.store(p_ml + o_partial * 2 + 1, b_sum, mask=is_stored)


@triton.jit
def _num_items(p_count, num_direct, DIRECT: tl.constexpr):
    """Number of whole items, and of all items."""
    if DIRECT:
        num_whole = num_direct
        num_items = num_direct
    else:
        num_whole = tl.load(p_count)
        num_items = num_whole + tl.load(p_count + 1)
    return num_whole, num_items


@triton.jit
def _facts(
    rows, i_row, i_split, MAX_SPLITS: tl.constexpr, SPLIT: tl.constexpr, DIRECT: tl.constexpr
):
    """The length of a row, which row of the block tables is its own, where its partial results
    begin, and the number of keys of the item that begins with i_split."""
    p_seq_len, p_table_row, p_first_partial, p_folded = rows
    first_partial = i_row * MAX_SPLITS if DIRECT else tl.load(p_first_partial + i_row)
    item_keys = num_keys(p_folded, i_row, i_split, SPLIT)
    return tl.load(p_seq_len + i_row), tl.load(p_table_row + i_row), first_partial, item_keys


@triton.jit
def _first_pages(p_row, first, item_keys, seq_len, shape: tl.constexpr):
    """Blocks of the first tile of an item whose keys would begin at `first` without a window."""
    start, _ = first_keys(first, seq_len, shape[7], shape[1])
    return pages_of(p_row, start, tl.minimum(first + item_keys, seq_len), shape[3], shape[2])


@triton.jit
def _scales(p_k_scale, p_v_scale, i_kv, qk_scale, FP8: tl.constexpr):
    v_scale = 1.0
    if FP8:
        qk_scale = qk_scale * tl.load(p_k_scale + i_kv)
        v_scale = tl.load(p_v_scale + i_kv)
    return qk_scale, v_scale


@triton.jit
def _ask_for_item(lists, i_item, DIRECT: tl.constexpr):
    """Loads the list entries of an item, in two parts whose sum it is: nothing waits for them
    yet."""
    p_item, p_tail, num_whole, num_items = lists
    if DIRECT:
        whole = 0
        tail = 0
    else:
        whole = tl.load(p_item + i_item, mask=i_item < num_whole, other=0)
        tail = tl.load(
            p_tail + i_item - num_whole, mask=(i_item >= num_whole) & (i_item < num_items), other=0
        )
    return whole, tail


@triton.jit
def _split_of(lists, i_item, item, MAX_SPLITS: tl.constexpr, DIRECT: tl.constexpr):
    """Row and split of an item; of one past the last, some other item's."""
    if DIRECT:
        i_item = tl.minimum(i_item, lists[3] - 1)
        i_row = i_item // MAX_SPLITS
        i_split = i_item % MAX_SPLITS
    else:
        i_row = (item[0] + item[1]) >> 16
        i_split = (item[0] + item[1]) & 0xFFFF
    return i_row, i_split


@triton.jit
def _task_after(p_count, i_next, DIRECT: tl.constexpr):
    """The task after the next one, by a ticket; the first two of a program are fixed."""
    if DIRECT:
        i_after = i_next + tl.num_programs(0)
    else:
        i_after = 2 * tl.num_programs(0) + tl.atomic_add(p_count + 3, 1, sem="relaxed")
    return i_after
