"""Prefill attention on Hopper, by means of `hopper_attention`: the bits of `prefill_attention`."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_attention import (
    REGISTERS,
    ROWS,
    advance,
    begin,
    conclude,
    finite,
    leave_out,
    oldest_key,
    pinned,
    row_sums,
    scaled,
    spread,
    with_sinks,
)
from .hopper_rings import as_ring_source, copy_tiles, make_pair_buffers, make_rings, widen_tiles
from .online_softmax import HALF, base_2_scale
from .paged_cache import head_constants, is_paired

NUM_STAGES = 2
FEW_TILES = 64


def hopper_prefill_attention(
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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Arguments as in `prefill_attention`; no window with an fp8 cache."""
    assert not (window and is_paired(k_cache))
    assert q.is_contiguous()
    assert out.is_contiguous()
    num_kv_heads = k_cache.shape[1]
    # The order in which programs start: the longest of all heads first, or head by head, whose keys
    # stay in the cache.
    heads_first = len(tiles) <= FEW_TILES
    _prefill_tiles[(num_kv_heads, len(tiles)) if heads_first else (len(tiles), num_kv_heads)](
        q,
        as_ring_source(k_cache),
        as_ring_source(v_cache),
        block_tables,
        table_rows,
        query_starts,
        seq_lens,
        tiles,
        out,
        seq_lens if k_scale is None else k_scale,
        seq_lens if v_scale is None else v_scale,
        sinks,
        base_2_scale(scale, q.shape[2]),
        block_tables.stride(0),
        **head_constants(q, k_cache),
        HALF=HALF,
        ROWS=ROWS,
        STAGES=NUM_STAGES,
        REGISTERS=REGISTERS,
        WINDOW=window,
        FP8=is_paired(k_cache),
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
    p_k_scale,
    p_v_scale,
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
    WINDOW: gl.constexpr,
    FP8: gl.constexpr,
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
    TILE: gl.constexpr = 2 * HALF
    query_start = gl.load(p_query_start + i_seq)
    count = gl.load(p_query_start + i_seq + 1) - query_start
    context = gl.load(p_seq_len + i_seq) - count
    first_token = gl.load(p_tile + i_tile * 2 + 1)
    p_row = p_table + gl.load(p_table_row + i_seq).to(gl.int64) * stride_table
    end = context + gl.minimum(first_token + 2 * TOKENS, count)
    # Both teams walk the tiles of which some row sees a key.
    first_tile = 0
    if WINDOW:
        first_tile = oldest_key(context + first_token, WINDOW) // TILE

    rings = make_rings(gl.float16 if FP8 else k.dtype, HALF, HEAD_DIM, STAGES)
    merged = gl.allocate_shared_memory(
        gl.float32, [2, ROWS, HEAD_DIM], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    v_scale = 1.0
    if FP8:
        qk_scale = qk_scale * gl.load(p_k_scale + i_kv)
        v_scale = gl.load(p_v_scale + i_kv)
    where = (p_q, p_out, query_start, count, context, i_kv, qk_scale, v_scale, p_sinks)
    shape: gl.constexpr = (NUM_KV_HEADS, GROUP, HEAD_DIM, SPLIT, HALF, ROWS, STAGES, WINDOW)
    first_rows = (merged.index(0), rings, where, first_token, first_tile, end, shape)
    last_rows = (merged.index(1), rings, where, first_token + TOKENS, first_tile, end, shape)
    ring_shape: gl.constexpr = (BLOCK_ROWS, PAGE, HALF, STAGES)
    if FP8:
        widened = (k, v, p_row, end, i_kv, rings, make_pair_buffers(k), ring_shape)
        gl.warp_specialize(
            [(_attend, first_rows), (_attend, last_rows), (widen_tiles, widened)],
            [4, 4],
            [REGISTERS, 24],
        )
    else:
        copied = (k, v, p_row, first_tile * TILE, end, 0, i_kv, rings, ring_shape)
        gl.warp_specialize(
            [(_attend, first_rows), (_attend, last_rows), (copy_tiles, copied)],
            [4, 1],
            [REGISTERS, 24],
        )


@gluon.jit
def _attend(merged, rings, where, first, first_tile, end, shape: gl.constexpr):
    """Computes 64 query rows, from token `first` on, over their keys in the tiles from `first_tile`
    on; finished splits wait in shared memory for the next."""
    p_q, p_out, _, count, context, i_kv, qk_scale, v_scale, p_sinks = where
    GROUP: gl.constexpr = shape[1]
    HEAD_DIM: gl.constexpr = shape[2]
    SPLIT: gl.constexpr = shape[3]
    HALF: gl.constexpr = shape[4]
    ROWS: gl.constexpr = shape[5]
    STAGES: gl.constexpr = shape[6]
    WINDOW: gl.constexpr = shape[7]
    TILE: gl.constexpr = 2 * HALF
    TOKENS: gl.constexpr = ROWS // GROUP
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    v_row: gl.constexpr = gl.SliceLayout(1, values)
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    if first >= count:
        leave_out(rings, 0, (end + TILE - 1) // TILE - first_tile, STAGES)
    else:
        o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
        o_q, is_row = places(o_r, first, where, shape, wide)
        b_q = gl.load(p_q + o_q, mask=is_row, other=0.0)
        b_q = gl.convert_layout(b_q.to(rings[0].dtype), gl.DotOperandLayout(0, scores, 2))
        # Rows past a chunk's end see the keys of its last row.
        last = context + gl.minimum(first + TOKENS, count) - 1
        num_tiles = last // TILE + 1
        num_clear = (context + first + 1) // TILE
        b_position = context + first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores)) // GROUP
        query = (b_q, qk_scale, b_position)
        tiles = (first_tile, num_tiles)

        b_m, b_l, b_left, b_right = begin(
            query,
            rings,
            0,
            first_tile + 1 < num_tiles,
            first_tile * TILE,
            values,
            True,
            HALF,
            STAGES,
            WINDOW,
        )
        state = (b_m, b_l, b_left, b_right, gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, values))
        total = (
            gl.full([ROWS], float("-inf"), gl.float32, v_row),
            gl.full([ROWS], 0.0, gl.float32, v_row),
        )
        # All rows see all keys of the tiles from `whole` to `num_clear`.
        whole = first_tile + 1
        if WINDOW:
            oldest = (oldest_key(last, WINDOW) + TILE - 1) // TILE
            whole = gl.minimum(gl.maximum(whole, oldest), num_tiles)
            for i in range(first_tile + 1, whole):
                state, total = _step(query, rings, i, tiles, state, merged, total, True, shape)
        for i in range(whole, num_clear):
            state, total = _step(query, rings, i, tiles, state, merged, total, False, shape)
        for i in range(gl.maximum(num_clear, whole), num_tiles):
            state, total = _step(query, rings, i, tiles, state, merged, total, True, shape)
        b_m, b_l, b_left, b_right, b_acc = state
        b_acc = conclude(rings, num_tiles - 1 - first_tile, b_left, b_right, b_acc, STAGES)
        is_begun = (num_tiles - 1) * TILE // SPLIT > first_tile * TILE // SPLIT
        b_m, b_l_all, b_acc = _merge(merged, total, b_m, b_l, b_acc, is_begun)
        o_head = gl.arange(0, ROWS, layout=v_row) % GROUP
        b_l_all = with_sinks(b_m, b_l_all, p_sinks, i_kv * GROUP + o_head, o_head >= 0)
        b_out = b_acc * (v_scale / b_l_all)[:, None]
        b_out = gl.convert_layout(b_out.to(p_out.dtype.element_ty), wide)
        # Computed anew: kept, the offsets would take registers from the loops.
        o_r = pinned(o_r)
        o_q, is_row = places(o_r, first, where, shape, wide)
        gl.store(p_out + o_q, b_out, mask=is_row)


@gluon.jit
def places(o_r, first, where, shape: gl.constexpr, layout: gl.constexpr):
    """Offsets of query rows in queries and outputs, [ROWS, D], and whether there is such a row,
    [ROWS, 1]."""
    _, _, query_start, count, _, i_kv, _, _, _ = where
    NUM_KV_HEADS: gl.constexpr = shape[0]
    GROUP: gl.constexpr = shape[1]
    HEAD_DIM: gl.constexpr = shape[2]
    TOKENS: gl.constexpr = shape[5] // GROUP
    b_token = first + o_r // GROUP
    is_row = (b_token < count) & (o_r < TOKENS * GROUP)
    o_q = (query_start + b_token).to(gl.int64) * (NUM_KV_HEADS * GROUP) + i_kv * GROUP + o_r % GROUP
    o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    return o_q[:, None] * HEAD_DIM + o_d[None, :], is_row[:, None]


@gluon.jit
def _step(query, rings, i, tiles, state, merged, total, MASKED: gl.constexpr, shape: gl.constexpr):
    """Computes tile i of `tiles`, the first and the one behind the last; a split that ended before
    it is merged. `total`: maximum and sums of the splits before."""
    first_tile, num_tiles = tiles
    HALF: gl.constexpr = shape[4]
    STAGES: gl.constexpr = shape[6]
    TILES: gl.constexpr = shape[3] // (2 * HALF)
    starts_split = i % TILES == 0
    has_next = i + 1 < num_tiles
    first = i * 2 * HALF
    new, b_alpha = advance(
        query,
        rings,
        i - first_tile,
        has_next,
        starts_split,
        first,
        state,
        MASKED,
        HALF,
        STAGES,
        shape[7],
    )
    b_m_new, b_l_new, b_left, b_right, b_acc = new
    b_m_all, b_l_all = total
    if starts_split:
        is_begun = i // TILES > first_tile // TILES + 1
        b_m_all, b_l_all, b_total = _merge(merged, total, state[0], state[1], b_acc, is_begun)
        merged.store(b_total)
    return (b_m_new, b_l_new, b_left, b_right, scaled(b_acc, b_alpha)), (b_m_all, b_l_all)


@gluon.jit
def _merge(merged, total, b_m_next, b_l_next, b_acc, begun):
    """Computes `online_softmax.merge_states` of the state in shared memory, if there is one, and a
    split that ended."""
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
        b_total = merged.load(b_acc.type.layout)
        b_acc = gl.fma(b_total, spread(b_old, b_acc), b_acc * b_next[:, None])
    return b_m_new, b_l, b_acc
