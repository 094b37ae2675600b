"""Shared-prefix attention on Hopper, by means of `hopper_attention`: to the bit as
`shared_prefix_attention`.

A program walks its work items with its rings full: the keys of the next item arrive while the last
one ends.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .decode_plan import DecodePlan
from .hopper_attention import (
    REGISTERS,
    ROWS,
    advance,
    begin,
    conclude,
    leave_out,
    row_sums,
    scaled,
    with_sinks,
)
from .hopper_rings import as_ring_source, copy_tiles, make_rings
from .online_softmax import HALF, base_2_scale
from .paged_cache import head_constants

NUM_STAGES = 3
MAX_PROGRAMS = 132
"""Largest number of programs: one for each multiprocessor, whose shared memory it fills."""


def hopper_shared_prefix_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Arguments as in `shared_prefix_attention`, without scales."""
    _shared_splits[(MAX_PROGRAMS,)](
        q,
        as_ring_source(k_cache),
        as_ring_source(v_cache),
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
        sinks,
        base_2_scale(scale, q.shape[2]),
        block_tables.stride(0),
        **head_constants(q, k_cache),
        HALF=HALF,
        ROWS=ROWS,
        STAGES=NUM_STAGES,
        REGISTERS=REGISTERS,
        num_warps=4,
    )


@gluon.jit
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
    p_sinks,
    qk_scale,
    stride_table,
    BLOCK_ROWS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    num_items = gl.load(p_count + 2) * NUM_KV_HEADS
    if gl.program_id(0) >= num_items:
        return
    rings = make_rings(k.dtype, HALF, HEAD_DIM, STAGES)
    items = (p_shared_split, p_shared_row, num_items)
    results = (p_partial_acc, p_partial_ml, p_out)
    where = (p_q, p_seq_len, p_first_partial, results, p_sinks, qk_scale)
    shape: gl.constexpr = (NUM_KV_HEADS, GROUP, HEAD_DIM, SPLIT, HALF, ROWS, STAGES)
    gl.warp_specialize(
        [
            (_attend, (rings, items, where, 0, shape)),
            (_attend, (rings, items, where, ROWS // GROUP, shape)),
            (
                _copy,
                (k, v, p_table, p_table_row, stride_table, rings, items, BLOCK_ROWS, PAGE, shape),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.jit
def _copy(
    k,
    v,
    p_table,
    p_table_row,
    stride_table,
    rings,
    items,
    BLOCK_ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    shape: gl.constexpr,
):
    p_shared_split, p_shared_row, num_items = items
    NUM_KV_HEADS: gl.constexpr = shape[0]
    SPLIT: gl.constexpr = shape[3]
    HALF: gl.constexpr = shape[4]
    STAGES: gl.constexpr = shape[6]
    SEQUENCES: gl.constexpr = 2 * (shape[5] // shape[1])
    TILES: gl.constexpr = SPLIT // (2 * HALF)
    for i_item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        i_split = gl.load(p_shared_split + i_item // NUM_KV_HEADS)
        leader = gl.load(p_shared_row + i_item // NUM_KV_HEADS * SEQUENCES)
        p_row = p_table + gl.load(p_table_row + leader).to(gl.int64) * stride_table
        turn = i_item // gl.num_programs(0) * TILES
        first = i_split * SPLIT
        ring_shape: gl.constexpr = (BLOCK_ROWS, PAGE, HALF, STAGES)
        copy_tiles(
            k, v, p_row, first, first + SPLIT, turn, i_item % NUM_KV_HEADS, rings, ring_shape
        )


@gluon.jit
def _attend(rings, items, where, first_member, shape: gl.constexpr):
    """Computes 64 query rows of each item: those of its sequences from `first_member` on."""
    p_shared_split, p_shared_row, num_items = items
    p_q, p_seq_len, p_first_partial, results, p_sinks, qk_scale = where
    p_partial_acc, p_partial_ml, p_out = results
    NUM_KV_HEADS: gl.constexpr = shape[0]
    GROUP: gl.constexpr = shape[1]
    HEAD_DIM: gl.constexpr = shape[2]
    SPLIT: gl.constexpr = shape[3]
    HALF: gl.constexpr = shape[4]
    ROWS: gl.constexpr = shape[5]
    STAGES: gl.constexpr = shape[6]
    SEQUENCES: gl.constexpr = ROWS // GROUP
    TILES: gl.constexpr = SPLIT // (2 * HALF)
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    s_row: gl.constexpr = gl.SliceLayout(1, scores)
    v_row: gl.constexpr = gl.SliceLayout(1, values)
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    for i_item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        turn = i_item // gl.num_programs(0) * TILES
        i_kv = i_item % NUM_KV_HEADS
        p_member = p_shared_row + i_item // NUM_KV_HEADS * (2 * SEQUENCES) + first_member
        if gl.load(p_member) < 0:
            leave_out(rings, turn, TILES, STAGES)
        else:
            b_row, b_head = _rows(p_member, i_kv, GROUP, ROWS, gl.SliceLayout(1, wide))
            o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, wide))
            o_q = (b_row * (NUM_KV_HEADS * GROUP) + b_head) * HEAD_DIM
            b_q = gl.load(p_q + o_q[:, None] + o_d[None, :], mask=(b_row >= 0)[:, None], other=0.0)
            b_q = gl.convert_layout(b_q, gl.DotOperandLayout(0, scores, 2))
            query = (b_q, qk_scale, gl.full([ROWS], 0, gl.int32, s_row))
            b_m, b_l, b_left, b_right = begin(
                query, rings, turn, True, 0, values, False, HALF, STAGES
            )
            state = (b_m, b_l, b_left, b_right, gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, values))
            for i in range(turn + 1, turn + TILES):
                state, b_alpha = advance(
                    query, rings, i, i + 1 < turn + TILES, False, 0, state, False, HALF, STAGES
                )
                state = (state[0], state[1], state[2], state[3], scaled(state[4], b_alpha))
            b_m, b_l, b_left, b_right, b_acc = state
            b_acc = conclude(rings, turn + TILES - 1, b_left, b_right, b_acc, STAGES)

            # A sequence of exactly one split is complete here; the others wait for their merge.
            b_row, b_head = _rows(p_member, i_kv, GROUP, ROWS, v_row)
            b_m = gl.convert_layout(b_m, v_row)
            b_l = gl.convert_layout(row_sums(b_l), v_row)
            o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, values))[None, :]
            is_row = b_row >= 0
            is_only = is_row & (gl.load(p_seq_len + b_row, mask=is_row, other=0) <= SPLIT)
            o_q = ((b_row * (NUM_KV_HEADS * GROUP) + b_head) * HEAD_DIM)[:, None] + o_d
            b_whole = with_sinks(b_m, b_l, p_sinks, b_head, is_only)
            b_out = b_acc * (1.0 / b_whole)[:, None]
            gl.store(p_out + o_q, b_out.to(p_out.dtype.element_ty), mask=is_only[:, None])
            i_split = gl.load(p_shared_split + i_item // NUM_KV_HEADS)
            b_partial = gl.load(p_first_partial + b_row, mask=is_row, other=0) + i_split
            o_partial = b_partial.to(gl.int64) * (NUM_KV_HEADS * GROUP) + b_head
            is_partial = is_row & (is_only == 0)
            gl.store(
                p_partial_acc + o_partial[:, None] * HEAD_DIM + o_d, b_acc, mask=is_partial[:, None]
            )
            gl.store(p_partial_ml + o_partial * 2, b_m, mask=is_partial)
            gl.store(p_partial_ml + o_partial * 2 + 1, b_l, mask=is_partial)


@gluon.jit
def _rows(p_member, i_kv, GROUP: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Sequence, negative for none, and head of each query row."""
    o_r = gl.arange(0, ROWS, layout=layout)
    b_row = gl.load(p_member + o_r // GROUP, mask=o_r < ROWS // GROUP * GROUP, other=-1)
    return b_row, i_kv * GROUP + o_r % GROUP
