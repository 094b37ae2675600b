"""Decode attention over splits that several sequences of a batch share: their keys are read once
for all of them.

`decode_plan` finds these splits in the block tables. Results go where the unshared path would have
put them, with the same bits: the same tiles of keys, the same arithmetic, only more query rows
beside one another. `hopper_shared_prefix_attention` computes the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_plan import DecodePlan
from .hopper_attention import ROWS, num_teams
from .online_softmax import (
    attend_tile,
    base_2_scale,
    finish,
    fresh_state,
    joined,
    narrowing,
    parts_of,
    row_sums,
    stages_of,
    with_sinks,
)
from .paged_cache import (
    as_operand,
    as_pairs,
    attention_constants,
    bulk_copied,
    head_bytes,
    load_tile,
    pages_of,
)

MAX_PROGRAMS = 4224
NUM_STAGES = 3


def shared_prefix_attention(
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
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """Arguments as in `decode_attention`; runs beside it (either order, or two streams), before
    `reduce_splits`."""
    (num_rows, _, head_dim), num_kv_heads = q.shape, k_cache.shape[1]
    constants = attention_constants(q, k_cache)
    num_bytes = head_bytes(q, k_cache)
    group = q.shape[1] // num_kv_heads
    rows = num_teams(q.device) * ROWS // narrowing(num_bytes)
    own_rows = min(plan.rows_per_tile, rows // group)
    most = triton.cdiv(num_rows, plan.rows_per_tile) * min(plan.max_splits, 64)
    num_programs = max(min(most, MAX_PROGRAMS // num_kv_heads), 1)
    _shared_splits[(num_programs, num_kv_heads)](
        q,
        as_operand(k_cache, constants["HALF"]),
        as_operand(v_cache, constants["HALF"]),
        block_tables,
        table_rows,
        seq_lens,
        plan.counts,
        plan.shared_splits,
        plan.shared_rows,
        plan.first_partials,
        plan.partial_acc,
        plan.partial_ml,
        out,
        seq_lens if k_scale is None else k_scale,
        seq_lens if v_scale is None else v_scale,
        sinks,
        base_2_scale(scale, head_dim),
        *as_pairs(k_cache).stride()[:3],
        block_tables.stride(0),
        **constants,
        ROWS=rows,
        ROWS_PER_TILE=plan.rows_per_tile,
        OWN_ROWS=own_rows,
        PARTS=triton.cdiv(plan.rows_per_tile, own_rows),
        SOFTCAP=softcap,
        BULK=bulk_copied(k_cache),
        num_warps=4 * num_teams(q.device),
        num_stages=stages_of(NUM_STAGES, num_bytes),
    )


@triton.jit
def _shared_splits(
    p_q,
    k,
    v,
    p_table,
    p_table_row,
    p_seq_len,
    p_count,
    p_shared_split,
    p_shared_row,
    p_first_partial,
    p_partial_acc,
    p_partial_ml,
    p_out,
    p_k_scale,
    p_v_scale,
    p_sinks,
    qk_scale,
    stride_block,
    stride_head,
    stride_slot,
    stride_table,
    BLOCK_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BULK: tl.constexpr,
    FP8: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    tiles: tl.constexpr = (BLOCK_ROWS, HEAD_DIM, PAGE, HALF, BULK, FP8)
    i_kv = tl.program_id(1)
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, HEAD_DIM)
    b_head = i_kv * GROUP + o_r % GROUP
    v_scale = 1.0
    if FP8:
        qk_scale = qk_scale * tl.load(p_k_scale + i_kv)
        v_scale = tl.load(p_v_scale + i_kv)
    for i_task in range(tl.program_id(0), tl.load(p_count + 2) * PARTS, tl.num_programs(0)):
        i_item = i_task // PARTS
        i_split = tl.load(p_shared_split + i_item)
        p_member = p_shared_row + i_item * ROWS_PER_TILE
        # Programs that have no queries of all rows of an item divide it.
        o_member = i_task % PARTS * OWN_ROWS + o_r // GROUP
        is_own = (o_r < OWN_ROWS * GROUP) & (o_member < ROWS_PER_TILE)
        b_row = tl.load(p_member + o_member, mask=is_own, other=-1)
        is_row = b_row >= 0
        p_row = p_table + tl.load(p_table_row + tl.load(p_member)).to(tl.int64) * stride_table

        o_q = (b_row * (NUM_KV_HEADS * GROUP) + b_head) * HEAD_DIM
        b_q = tl.load(p_q + o_q[:, None] + o_d[None, :], mask=is_row[:, None], other=0.0)
        b_q = parts_of(b_q, FP8)
        b_m, b_l, b_acc = fresh_state(ROWS, HEAD_DIM, FP8)
        first = i_split * SPLIT
        end = i_split * SPLIT + SPLIT
        cache = (k, v, p_row, i_kv, stride_block, stride_head, stride_slot)
        pages = pages_of(p_row, first, end, PAGE, HALF)
        for i_in in range(0, SPLIT, TILE):
            i_n = first + i_in
            keys, values = load_tile(cache, pages, i_n, end, tiles, ON_GPU)
            pages = pages_of(p_row, i_n + TILE, end, PAGE, HALF)
            b_m, b_l, b_acc = attend_tile(
                b_q, keys, values, 0, qk_scale, b_m, b_l, b_acc, False, SOFTCAP
            )
        b_sum = row_sums(b_l)
        b_acc = joined(b_acc)

        # A sequence of exactly one split is complete here; the others wait for their merge.
        is_only = is_row & (tl.load(p_seq_len + b_row, mask=is_row, other=0) <= SPLIT)
        b_whole = with_sinks(b_m, b_sum, p_sinks, b_head, is_only)
        b_out = finish(b_whole, b_acc, v_scale).to(p_out.dtype.element_ty)
        tl.store(p_out + o_q[:, None] + o_d[None, :], b_out, mask=is_only[:, None])
        b_partial = tl.load(p_first_partial + b_row, mask=is_row, other=0) + i_split
        o_partial = b_partial.to(tl.int64) * (NUM_KV_HEADS * GROUP) + b_head
        is_partial = is_row & (is_only == 0)
        tl.store(
            p_partial_acc + o_partial[:, None] * HEAD_DIM + o_d[None, :],
            b_acc,
            mask=is_partial[:, None],
        )
        tl.store(p_partial_ml + o_partial * 2, b_m, mask=is_partial)
        tl.store(p_partial_ml + o_partial * 2 + 1, b_sum, mask=is_partial)
