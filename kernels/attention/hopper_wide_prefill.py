"""Prefill attention on Hopper for heads of 256: the bits of `prefill_attention`.

Two teams of 64 query rows each share tiles of keys and values, as in `hopper_prefill_attention`.
Queries lie in shared memory, since the values of a row take half of a thread's registers, and the
values of finished splits wait in global memory: each thread reads there what it wrote."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from .hopper_attention import (
    REGISTERS,
    ROWS,
    TEAMS,
    finite,
    fold,
    hide,
    leave_out,
    reference,
    row_sums,
    scaled,
    spread,
    weigh,
    with_sinks,
)
from .hopper_prefill_attention import FEW_TILES, places
from .hopper_rings import as_ring_source, copy_tiles, make_rings
from .online_softmax import HALF, base_2_scale
from .paged_cache import head_constants

HEAD_DIM = 256
NUM_STAGES = 1


def hopper_wide_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Arguments as in `prefill_attention`, with q [T, Hq, 256]."""
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert q.shape[2] == HEAD_DIM
    num_kv_heads = k_cache.shape[1]
    num_tiles = len(tiles)
    heads_first = num_tiles <= FEW_TILES
    merged = torch.empty(
        num_tiles * num_kv_heads, TEAMS, ROWS, HEAD_DIM, dtype=torch.float32, device=q.device
    )
    _prefill_tiles[(num_kv_heads, num_tiles) if heads_first else (num_tiles, num_kv_heads)](
        q,
        as_ring_source(k_cache),
        as_ring_source(v_cache),
        block_tables,
        table_rows,
        query_starts,
        seq_lens,
        tiles,
        out,
        merged,
        sinks,
        base_2_scale(scale, q.shape[2]),
        block_tables.stride(0),
        **head_constants(q, k_cache),
        HALF=HALF,
        ROWS=ROWS,
        STAGES=NUM_STAGES,
        REGISTERS=REGISTERS,
        HEADS_FIRST=heads_first,
        num_warps=4,
    )


@gluon.jit
def _prefill_tiles(
    p_q,
    k,
    v,
    p_table,
    p_table_row,
    p_query_start,
    p_seq_len,
    p_tile,
    p_out,
    p_merged,
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
    HEADS_FIRST: gl.constexpr,
):
    if HEADS_FIRST:
        i_kv = gl.program_id(0)
        i_tile = gl.program_id(1)
    else:
        i_tile = gl.program_id(0)
        i_kv = gl.program_id(1)
    i_seq = gl.load(p_tile + i_tile * 2)
    if i_seq < 0:
        return
    TOKENS: gl.constexpr = ROWS // GROUP
    query_start = gl.load(p_query_start + i_seq)
    count = gl.load(p_query_start + i_seq + 1) - query_start
    context = gl.load(p_seq_len + i_seq) - count
    first_token = gl.load(p_tile + i_tile * 2 + 1)
    p_row = p_table + gl.load(p_table_row + i_seq).to(gl.int64) * stride_table
    end = context + gl.minimum(first_token + 2 * TOKENS, count)

    rings = make_rings(k.dtype, HALF, HEAD_DIM, STAGES)
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], k.dtype)
    queries = gl.allocate_shared_memory(k.dtype, [2, ROWS, HEAD_DIM], rows)
    p_own = p_merged + (i_tile.to(gl.int64) * NUM_KV_HEADS + i_kv) * (2 * ROWS * HEAD_DIM)
    where = (p_q, p_out, query_start, count, context, i_kv, qk_scale, 1.0, p_sinks)
    shape: gl.constexpr = (NUM_KV_HEADS, GROUP, HEAD_DIM, SPLIT, HALF, ROWS, STAGES)
    first_rows = (queries.index(0), p_own, rings, where, first_token, end, shape)
    p_own += ROWS * HEAD_DIM
    last_rows = (queries.index(1), p_own, rings, where, first_token + TOKENS, end, shape)
    ring_shape: gl.constexpr = (BLOCK_ROWS, PAGE, HALF, STAGES)
    copied = (k, v, p_row, 0, end, 0, i_kv, rings, ring_shape)
    gl.warp_specialize(
        [(_attend, first_rows), (_attend, last_rows), (copy_tiles, copied)],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.jit
def _attend(queries, p_merged, rings, where, first, end, shape: gl.constexpr):
    """Computes 64 query rows, from token `first` on, over all their keys, one split after
    another."""
    p_q, p_out, _, count, context, i_kv, qk_scale, _, p_sinks = where
    GROUP: gl.constexpr = shape[1]
    HEAD_DIM: gl.constexpr = shape[2]
    SPLIT: gl.constexpr = shape[3]
    HALF: gl.constexpr = shape[4]
    ROWS: gl.constexpr = shape[5]
    STAGES: gl.constexpr = shape[6]
    TILE: gl.constexpr = 2 * HALF
    TILES: gl.constexpr = SPLIT // TILE
    TOKENS: gl.constexpr = ROWS // GROUP
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    v_row: gl.constexpr = gl.SliceLayout(1, values)
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    if first >= count:
        leave_out(rings, 0, (end + TILE - 1) // TILE, STAGES)
    else:
        o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
        o_q, is_row = places(o_r, first, where, shape, wide)
        queries.store(gl.load(p_q + o_q, mask=is_row, other=0.0))
        hopper.fence_async_shared()
        gl.thread_barrier()
        # Rows past a chunk's end see the keys of its last row.
        last = context + gl.minimum(first + TOKENS, count) - 1
        num_tiles = last // TILE + 1
        num_clear = (context + first + 1) // TILE
        b_position = context + first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores)) // GROUP
        query = (queries, qk_scale, b_position)
        o_row = gl.arange(0, ROWS, layout=v_row)
        o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, values))
        p_cells = p_merged + o_row[:, None] * HEAD_DIM + o_d[None, :]
        b_m_all = gl.full([ROWS], float("-inf"), gl.float32, v_row)
        b_l_all = gl.full([ROWS], 0.0, gl.float32, v_row)
        b_acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, values)
        for first_tile in range(0, num_tiles, TILES):
            b_m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
            b_l = fold(fold(gl.full([ROWS, HALF], 0.0, gl.float32, scores)))
            b_acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, values)
            end_tile = gl.minimum(first_tile + TILES, num_tiles)
            clear = gl.minimum(gl.maximum(num_clear, first_tile), end_tile)
            for i in range(first_tile, clear):
                b_m, b_l, b_acc = _add_tile(query, rings, i, b_m, b_l, b_acc, False, HALF, STAGES)
            for i in range(clear, end_tile):
                b_m, b_l, b_acc = _add_tile(query, rings, i, b_m, b_l, b_acc, True, HALF, STAGES)
            total = (b_m_all, b_l_all)
            b_m_all, b_l_all, b_acc = _merge(p_cells, total, b_m, b_l, b_acc, first_tile > 0)
            if end_tile < num_tiles:
                gl.store(p_cells, b_acc)
        o_head = o_row % GROUP
        b_l_all = with_sinks(b_m_all, b_l_all, p_sinks, i_kv * GROUP + o_head, o_head >= 0)
        b_out = (b_acc * (1.0 / b_l_all)[:, None]).to(p_out.dtype.element_ty)
        # Rows leave by way of the queries' memory, whole lines at a time.
        gl.thread_barrier()
        queries.store(b_out)
        gl.thread_barrier()
        gl.store(p_out + o_q, queries.load(wide), mask=is_row)


@gluon.jit
def _add_tile(
    query, rings, turn, b_m, b_l, b_acc,
    MASKED: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes `online_softmax.attend_tile` of a tile of the rings."""
    queries, qk_scale, b_position = query
    k_ring, v_ring, k_ready, v_ready, k_free, v_free = rings
    slot = turn % STAGES
    phase = turn // STAGES & 1
    hopper.mbarrier.wait(k_ready.index(slot), phase)
    scores: gl.constexpr = b_m.type.layout.parent
    b_zero = gl.full([queries.shape[0], HALF], 0.0, gl.float32, scores)
    k_left = k_ring.index(2 * slot).permute((1, 0))
    k_right = k_ring.index(2 * slot + 1).permute((1, 0))
    b_left = hopper.warpgroup_mma(queries, k_left, b_zero, use_acc=False, is_async=True)
    b_right = hopper.warpgroup_mma(queries, k_right, b_zero, use_acc=False, is_async=True)
    b_left, b_right = hopper.warpgroup_mma_wait(0, deps=[b_left, b_right])
    hopper.mbarrier.arrive(k_free.index(slot), count=1)
    if MASKED:
        b_left, b_right = hide(b_left, b_right, turn * 2 * HALF, b_position, HALF)
    b_m_new = gl.maximum(b_m, reference(b_left, b_right, qk_scale))
    b_shift = finite(b_m_new)
    b_left = weigh(b_left, qk_scale, b_shift)
    b_right = weigh(b_right, qk_scale, b_shift)
    b_alpha = gl.exp2(b_m - b_shift)
    b_l = gl.fma(b_l, spread(b_alpha, b_l), fold(fold(b_left + b_right)))
    b_acc = scaled(b_acc, b_alpha)
    weights: gl.constexpr = gl.DotOperandLayout(0, b_acc.type.layout, 2)
    b_left = gl.convert_layout(b_left.to(k_ring.dtype), weights)
    b_right = gl.convert_layout(b_right.to(k_ring.dtype), weights)
    hopper.mbarrier.wait(v_ready.index(slot), phase)
    b_acc = hopper.warpgroup_mma(b_left, v_ring.index(2 * slot), b_acc, is_async=True)
    b_acc = hopper.warpgroup_mma(b_right, v_ring.index(2 * slot + 1), b_acc, is_async=True)
    b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
    hopper.mbarrier.arrive(v_free.index(slot), count=1)
    return b_m_new, b_l, b_acc


@gluon.jit
def _merge(p_cells, total, b_m_next, b_l_next, b_acc, begun):
    """Computes `online_softmax.merge_states` of the state whose values are in memory, if there is
    one, and a split that ended."""
    b_m, b_l = total
    v_row: gl.constexpr = gl.SliceLayout(1, b_acc.type.layout)
    b_m_next = gl.convert_layout(b_m_next, v_row)
    b_l_next = gl.convert_layout(row_sums(b_l_next), v_row)
    b_m_new = gl.maximum(b_m, b_m_next)
    b_shift = finite(b_m_new)
    b_old = gl.exp2(b_m - b_shift)
    b_next = gl.exp2(b_m_next - b_shift)
    b_l = gl.fma(b_l, b_old, b_l_next * b_next)
    if begun:
        b_acc = gl.fma(gl.load(p_cells), spread(b_old, b_acc), b_acc * b_next[:, None])
    return b_m_new, b_l, b_acc
