"""Decode attention of a few rows on Hopper: `decode_attention` with `reduce_splits`, to the bit, in
one launch.

Latency is all: a program asks for its keys before it waits for the kernel before it, and has most
of a split under way at once; whichever program of a row and head ends last merges the splits.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..launch import dependent_launch
from ..launch.hopper_copies import release_dependents, wait_for_inputs
from .decode_plan import DecodePlan
from .hopper_attention import (
    finite,
    fold,
    hide,
    hide_old,
    oldest_key,
    reference,
    spread,
    weigh,
    with_sinks,
)
from .hopper_rings import as_ring_source, finish_reads
from .online_softmax import HALF, base_2_scale
from .paged_cache import head_constants

NUM_STAGES = 3
MAX_PROGRAMS = 128
"""Largest number of programs: one for each multiprocessor, whose shared memory it fills."""


def hopper_decode_attention(
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
    window: int = 0,
    sinks: torch.Tensor | None = None,
    dependent: bool,
) -> None:
    """Arguments as in `decode_attention`, without scales; merges its splits itself. With
    `dependent`, the previous kernel is the one that writes q and the newest keys and values, and it
    releases this one only when most of its work has begun."""
    assert q.is_contiguous()
    assert out.is_contiguous()
    num_rows, _, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    num_programs = max(min(num_rows * plan.max_splits, MAX_PROGRAMS // num_kv_heads), 1)
    _decode_rows[(num_programs, num_kv_heads)](
        q,
        as_ring_source(k_cache),
        as_ring_source(v_cache),
        block_tables,
        table_rows,
        seq_lens,
        plan.arrived,
        plan.partial_acc,
        plan.partial_ml,
        out,
        sinks,
        base_2_scale(scale, head_dim),
        block_tables.stride(0),
        num_rows,
        **head_constants(q, k_cache),
        HALF=HALF,
        MAX_SPLITS=plan.max_splits,
        STAGES=NUM_STAGES,
        WINDOW=window,
        DEPENDENT=dependent,
        num_warps=4,
        **dependent_launch.launch_options(dependent),
    )


@gluon.jit
def _decode_rows(
    p_q,
    k,
    v,
    p_table,
    p_table_row,
    p_seq_len,
    p_arrived,
    p_partial_acc,
    p_partial_ml,
    p_out,
    p_sinks,
    qk_scale,
    stride_table,
    num_rows,
    BLOCK_ROWS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    HALF: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    ROWS: gl.constexpr = 16
    TILE: gl.constexpr = 2 * HALF
    gl.static_assert(GROUP <= ROWS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    row: gl.constexpr = gl.SliceLayout(1, mma)
    # A thread has a whole row, so that folds are its own.
    flat: gl.constexpr = gl.BlockedLayout([1, HALF // 2], [32, 1], [4, 1], [1, 0])
    shape: gl.constexpr = (BLOCK_ROWS, PAGE, HALF, STAGES, WINDOW)
    i_kv = gl.program_id(1)
    rings = _make_rings(k, v, HALF, HEAD_DIM, STAGES)
    o_r = gl.arange(0, ROWS, layout=row)
    o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, mma))
    is_head = o_r < GROUP
    turn = gl.program_id(0) * 0
    for i_item in range(gl.program_id(0), num_rows * MAX_SPLITS, gl.num_programs(0)):
        i_row = i_item // MAX_SPLITS
        i_split = i_item % MAX_SPLITS
        seq_len = gl.load(p_seq_len + i_row)
        end = gl.minimum(i_split * SPLIT + SPLIT, seq_len)
        first = i_split * SPLIT
        oldest = 0
        if WINDOW:
            oldest = oldest_key(seq_len - 1, WINDOW)
            first = gl.maximum(first, oldest // TILE * TILE)
        if first < end:
            p_row = p_table + gl.load(p_table_row + i_row).to(gl.int64) * stride_table
            source = (k, v, p_row, end, i_kv)
            num_tiles = _start(source, rings, first, end == seq_len, turn, DEPENDENT, shape)
            o_q = ((i_row * NUM_KV_HEADS + i_kv) * GROUP + o_r)[:, None] * HEAD_DIM + o_d[None, :]
            b_q = gl.load(p_q + o_q, mask=is_head[:, None], other=0.0)
            b_q = gl.convert_layout(b_q, gl.DotOperandLayout(0, mma, 2))
            b_m = gl.full([ROWS], float("-inf"), gl.float32, row)
            b_l = fold(gl.full([ROWS, HALF // 2], 0.0, gl.float32, flat))
            b_acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, mma)
            b_last = gl.full([ROWS], 0, gl.int32, row) + end - 1
            for i in range(num_tiles):
                b_m, b_l, b_acc = _attend(
                    b_q,
                    rings,
                    turn + i,
                    first + i * TILE,
                    (oldest, b_last),
                    qk_scale,
                    b_m,
                    b_l,
                    b_acc,
                    flat,
                    shape,
                )
                finish_reads()
                if i + STAGES < num_tiles:
                    _copy(source, rings, first + (i + STAGES) * TILE, turn + i + STAGES, shape)
            turn += num_tiles
            b_sum = gl.convert_layout(row_sums(b_l), row)

            oldest_split = oldest // SPLIT
            num_splits = (seq_len + SPLIT - 1) // SPLIT - oldest_split
            is_last = True
            if num_splits > 1:
                o_partials = i_row * MAX_SPLITS * (NUM_KV_HEADS * GROUP) + i_kv * GROUP + o_r
                partials = (p_partial_acc, p_partial_ml, o_partials, is_head, o_d)
                store_partial(partials, i_split, b_m, b_sum, b_acc, NUM_KV_HEADS * GROUP, HEAD_DIM)
                gl.thread_barrier()
                p_count = p_arrived + i_row * NUM_KV_HEADS + i_kv
                is_last = gl.atomic_add(p_count, 1, sem="acq_rel", scope="gpu") == num_splits - 1
                if is_last:
                    gl.store(p_count, 0)
                    first_partials = o_partials + oldest_split * (NUM_KV_HEADS * GROUP)
                    partials = (p_partial_acc, p_partial_ml, first_partials, is_head, o_d)
                    b_m, b_sum, b_acc = _merge(partials, num_splits, NUM_KV_HEADS * GROUP, HEAD_DIM)
            if is_last:
                b_sum = with_sinks(b_m, b_sum, p_sinks, i_kv * GROUP + o_r, is_head)
                b_out = b_acc * (1.0 / b_sum)[:, None]
                gl.store(p_out + o_q, b_out.to(p_out.dtype.element_ty), mask=is_head[:, None])
    # Programs without work wait too, so that this kernel ends only after the one before it.
    wait_for_inputs(DEPENDENT)


@gluon.jit
def _make_rings(k, v, HALF: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    k_ring = gl.allocate_shared_memory(k.dtype, [2 * STAGES, HALF, HEAD_DIM], k.layout)
    v_ring = gl.allocate_shared_memory(v.dtype, [2 * STAGES, HALF, HEAD_DIM], v.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
    hopper.fence_async_shared()
    gl.thread_barrier()
    return k_ring, v_ring, ready


@gluon.jit
def _start(source, rings, first, is_newest, turn, DEPENDENT: gl.constexpr, shape: gl.constexpr):
    """Copies the first tiles of the split that begins at `first`; before the previous kernel has
    ended, only those to which that kernel does not write. Returns the number of tiles in the
    split."""
    STAGES: gl.constexpr = shape[3]
    TILE: gl.constexpr = 2 * shape[2]
    num_tiles = (source[3] - first + TILE - 1) // TILE
    # The newest position is in the last tile of the last split.
    num_old = gl.where(is_newest, num_tiles - 1, num_tiles)
    num_early = gl.minimum(num_old, STAGES)
    for i in range(num_early):
        _copy(source, rings, first + i * TILE, turn + i, shape)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    for i in range(num_early, gl.minimum(num_tiles, STAGES)):
        _copy(source, rings, first + i * TILE, turn + i, shape)
    return num_tiles


@gluon.jit
def _copy(source, rings, start, turn, shape: gl.constexpr):
    """Copies both halves of the tile of positions from `start` on; past the end it copies the last
    block again."""
    k, v, p_row, end, i_kv = source
    k_ring, v_ring, ready = rings
    BLOCK_ROWS: gl.constexpr = shape[0]
    PAGE: gl.constexpr = shape[1]
    HALF: gl.constexpr = shape[2]
    slot = turn % shape[3]
    left = gl.load(p_row + start // PAGE) * BLOCK_ROWS + i_kv * PAGE + start % PAGE
    right = gl.load(p_row + gl.minimum(start + HALF, end - 1) // PAGE) * BLOCK_ROWS
    right += i_kv * PAGE + (start + HALF) % PAGE
    hopper.mbarrier.expect(ready.index(slot), 4 * k.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(k, [left, 0], ready.index(slot), k_ring.index(2 * slot))
    hopper.tma.async_copy_global_to_shared(
        k, [right, 0], ready.index(slot), k_ring.index(2 * slot + 1)
    )
    hopper.tma.async_copy_global_to_shared(v, [left, 0], ready.index(slot), v_ring.index(2 * slot))
    hopper.tma.async_copy_global_to_shared(
        v, [right, 0], ready.index(slot), v_ring.index(2 * slot + 1)
    )


@gluon.jit
def _attend(
    b_q,
    rings,
    turn,
    first,
    seen,
    qk_scale,
    b_m,
    b_l,
    b_acc,
    flat: gl.constexpr,
    shape: gl.constexpr,
):
    """Computes `online_softmax.attend_tile` of the tile from position `first` on. `seen`: the
    oldest position that is seen, and the last ones."""
    oldest, b_last = seen
    k_ring, v_ring, ready = rings
    HALF: gl.constexpr = shape[2]
    STAGES: gl.constexpr = shape[3]
    slot = turn % STAGES
    hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
    b_left = scores(b_q, k_ring.index(2 * slot), HALF)
    b_right = scores(b_q, k_ring.index(2 * slot + 1), HALF)
    b_left, b_right = hide(b_left, b_right, first, b_last, HALF)
    if shape[4]:
        b_left, b_right = hide_old(b_left, b_right, first, oldest, HALF)
    b_m_new = gl.maximum(b_m, reference(b_left, b_right, qk_scale))
    b_shift = finite(b_m_new)
    b_left = weigh(b_left, qk_scale, b_shift)
    b_right = weigh(b_right, qk_scale, b_shift)
    b_alpha = gl.exp2(b_m - b_shift)
    b_sums = fold(gl.convert_layout(fold(b_left + b_right), flat))
    b_l = gl.fma(b_l, spread(b_alpha, b_l), b_sums)
    b_acc = b_acc * spread(b_alpha, b_acc)
    b_acc = weighted(b_left.to(k_ring.dtype), v_ring.index(2 * slot), b_acc)
    b_acc = weighted(b_right.to(k_ring.dtype), v_ring.index(2 * slot + 1), b_acc)
    return b_m_new, b_l, b_acc


@gluon.jit
def scores(b_q, keys, NUM_KEYS: gl.constexpr):
    layout: gl.constexpr = b_q.type.layout.parent
    b_k = keys.permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
    return hopper.mma_v2(b_q, b_k, gl.full([b_q.shape[0], NUM_KEYS], 0.0, gl.float32, layout))


@gluon.jit
def weighted(b_p, values, b_acc):
    layout: gl.constexpr = b_acc.type.layout
    b_v = values.load(gl.DotOperandLayout(1, layout, 2))
    return hopper.mma_v2(gl.convert_layout(b_p, gl.DotOperandLayout(0, layout, 2)), b_v, b_acc)


@gluon.jit
def row_sums(b_l):
    b_left, b_right = gl.split(fold(fold(fold(b_l))))
    return b_left + b_right


@gluon.jit
def store_partial(
    partials, i_split, b_m, b_l, b_acc, NUM_Q_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr
):
    p_partial_acc, p_partial_ml, o_partials, is_head, o_d = partials
    o_partial = (o_partials + i_split * NUM_Q_HEADS).to(gl.int64)
    gl.store(
        p_partial_acc + o_partial[:, None] * HEAD_DIM + o_d[None, :], b_acc, mask=is_head[:, None]
    )
    gl.store(p_partial_ml + o_partial * 2, b_m, mask=is_head)
    gl.store(p_partial_ml + o_partial * 2 + 1, b_l, mask=is_head)


@gluon.jit
def _merge(partials, num_splits, NUM_Q_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Merges so many splits of the row, first to last, as `reduce_splits`: their maximum, sum and
    values."""
    p_partial_acc, p_partial_ml, o_partials, is_head, o_d = partials
    AT_ONCE: gl.constexpr = 8
    layout: gl.constexpr = o_d.type.layout.parent
    b_m = gl.full(is_head.shape, float("-inf"), gl.float32, is_head.type.layout)
    b_l = gl.full(is_head.shape, 0.0, gl.float32, is_head.type.layout)
    b_acc = gl.full([is_head.shape[0], HEAD_DIM], 0.0, gl.float32, layout)
    for i_first in range(0, num_splits, AT_ONCE):
        for i_ahead in gl.static_range(AT_ONCE):
            # Splits past the last are empty states, which a merge leaves out to the bit.
            present = is_head & (i_first + i_ahead < num_splits)
            o_partial = (o_partials + (i_first + i_ahead) * NUM_Q_HEADS).to(gl.int64)
            b_m_next = gl.load(
                p_partial_ml + o_partial * 2,
                mask=present,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            b_l_next = gl.load(
                p_partial_ml + o_partial * 2 + 1, mask=present, other=0.0, cache_modifier=".cg"
            )
            p_next = p_partial_acc + o_partial[:, None] * HEAD_DIM + o_d[None, :]
            b_next = gl.load(p_next, mask=present[:, None], other=0.0, cache_modifier=".cg")
            b_m, b_l, b_acc = merge_states(b_m, b_l, b_acc, b_m_next, b_l_next, b_next)
    return b_m, b_l, b_acc


@gluon.jit
def merge_states(b_m, b_l, b_acc, b_m_next, b_l_next, b_acc_next):
    """Computes `online_softmax.merge_states`."""
    b_m_new = gl.maximum(b_m, b_m_next)
    b_shift = finite(b_m_new)
    b_old_scale = gl.exp2(b_m - b_shift)
    b_next_scale = gl.exp2(b_m_next - b_shift)
    b_l = gl.fma(b_l, b_old_scale, b_l_next * b_next_scale)
    b_acc = gl.fma(b_acc, spread(b_old_scale, b_acc), b_acc_next * b_next_scale[:, None])
    return b_m_new, b_l, b_acc
