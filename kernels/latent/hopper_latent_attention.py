"""Attention over latents on Hopper, of decoding rows and of prompts: the bits of `latent_attention`.

A program owns 64 query rows, tokens times heads. One team of four warps computes scores and weights,
a tile ahead of two teams that each add up half of the values; a warp copies tiles of latents into a
ring, each of them once, for scores and for values. Merged splits of a program wait in device memory
for the next one: registers and shared memory are full.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..attention.hopper_attention import finite, fold, row_sums, scaled, spread, weigh
from ..attention.online_softmax import GRAIN, SPLIT, base_2_scale
from ..attention.paged_cache import block_rows, rows_of
from ..launch.device import num_multiprocessors
from .latent_plan import ROWS, LatentPlan
from .latent_tiles import KEYS
from .latent_walk import piece_at, places_of

WIDE = 128
"""Numbers of a latent that lie together in shared memory."""
RANK = 512
ROTARY = 64
"""Numbers of a latent without and with a position, of models that this kernel serves."""
NUM_STAGES = 4 if KEYS == 32 else 2
"""Number of tiles of latents in shared memory."""
NUM_WEIGHTS = 2
"""Number of tiles of weights in shared memory."""
REGISTERS = 176
"""Registers of a thread that adds up values."""

_places_of = gluon.jit(places_of.fn)
_piece_at = gluon.jit(piece_at.fn)


def hopper_latent_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    plan: LatentPlan,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Arguments as in `latent_decode`."""
    num_heads = q.shape[1]
    _launch(
        plan.num_ranges * -(-num_heads // ROWS),
        q,
        cache,
        (plan.counts, plan.row_of_split, plan.first_partials, seq_lens, table_rows, seq_lens),
        block_tables,
        plan.num_ranges,
        (plan.partial_acc, plan.partial_ml),
        out,
        scale,
        DECODES=True,
    )


def hopper_latent_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: torch.Tensor,
    totals: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Arguments as in `latent_prefill`."""
    if len(tiles) == 0:
        return
    _launch(
        min(num_multiprocessors(q.device), len(tiles)),
        q,
        cache,
        (seq_lens, tiles, seq_lens, seq_lens, table_rows, query_starts),
        block_tables,
        len(tiles),
        (totals, totals),
        out,
        scale,
        DECODES=False,
    )


def _launch(
    num_programs: int,
    q: torch.Tensor,
    cache: torch.Tensor,
    walk: tuple[torch.Tensor, ...],
    block_tables: torch.Tensor,
    num_parts: int,
    partials: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scale: float,
    **constants: Any,
) -> None:
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert q.shape[2] == RANK + ROTARY
    queries = q.flatten(0, 1)
    latents = rows_of(cache[:, None])
    _attend_latents[(num_programs,)](
        _described(queries, [ROWS, WIDE]),
        _described(queries, [ROWS, ROTARY]),
        _described(latents, [KEYS, WIDE]),
        _described(latents, [KEYS, ROTARY]),
        *walk,
        block_tables,
        *partials,
        out,
        base_2_scale(scale, q.shape[2]),
        block_tables.stride(0),
        num_parts,
        HEADS=q.shape[1],
        BLOCK_ROWS=block_rows(cache[:, None]),
        PAGE=cache.shape[1],
        SPLIT=SPLIT,
        KEYS=KEYS,
        STAGES=NUM_STAGES,
        WEIGHTS=NUM_WEIGHTS,
        REGISTERS=REGISTERS,
        **constants,
        num_warps=4,
    )


def _described(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(matrix, block, layout)


@gluon.jit
def _attend_latents(
    q_wide,
    q_narrow,
    wide,
    narrow,
    p_count,
    p_item,
    p_first,
    p_seq_len,
    p_table_row,
    p_query_start,
    p_table,
    p_total,
    p_partial_ml,
    p_out,
    qk_scale,
    stride_table,
    num_parts,
    HEADS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    WEIGHTS: gl.constexpr,
    REGISTERS: gl.constexpr,
    DECODES: gl.constexpr,
):
    WIDE: gl.constexpr = wide.block_shape[1]
    ROTARY: gl.constexpr = narrow.block_shape[1]
    ROWS: gl.constexpr = q_wide.block_shape[0]
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], wide.dtype)
    queries = (
        gl.allocate_shared_memory(wide.dtype, [4, ROWS, WIDE], q_wide.layout),
        gl.allocate_shared_memory(wide.dtype, [ROWS, ROTARY], q_narrow.layout),
    )
    ring = (
        gl.allocate_shared_memory(wide.dtype, [4 * STAGES, KEYS, WIDE], wide.layout),
        gl.allocate_shared_memory(wide.dtype, [STAGES, KEYS, ROTARY], narrow.layout),
    )
    messages = (
        gl.allocate_shared_memory(wide.dtype, [WEIGHTS, ROWS, KEYS], weights),
        gl.allocate_shared_memory(gl.float32, [3 * WEIGHTS, ROWS], vector),
    )
    # NOTE: a tile of latents is freed by all three teams, a tile of weights by those of values.
    barriers = (
        _make_barriers(STAGES, 1),
        _make_barriers(STAGES, 3),
        _make_barriers(WEIGHTS, 1),
        _make_barriers(WEIGHTS, 2),
        _make_barriers(1, 1),
        _make_barriers(1, 1),
    )
    hopper.fence_async_shared()
    gl.thread_barrier()
    memory = (queries, ring, messages, barriers)
    walk = (p_count, p_item, p_first, p_seq_len, p_table_row, p_query_start, num_parts)
    shape: gl.constexpr = (HEADS, BLOCK_ROWS, PAGE, SPLIT, KEYS, STAGES, WEIGHTS, DECODES)
    gl.warp_specialize(
        [
            (_score, (memory, walk, p_partial_ml, qk_scale, shape)),
            (_add_values, (memory, walk, p_total, p_out, 0, shape)),
            (_add_values, (memory, walk, p_total, p_out, 1, shape)),
            (_copy, (memory, walk, (q_wide, q_narrow, wide, narrow), p_table, stride_table, shape)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )


@gluon.jit
def _make_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        hopper.mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _copy(memory, walk, sources, p_table, stride_table, shape: gl.constexpr):
    """Fills the ring with latents, and the place of queries with those of the next item."""
    queries, ring, messages, barriers = memory
    ready, free, p_ready, p_free, q_ready, q_free = barriers
    q_wide, q_narrow, wide, narrow = sources
    BLOCK_ROWS: gl.constexpr = shape[1]
    PAGE: gl.constexpr = shape[2]
    KEYS: gl.constexpr = shape[4]
    STAGES: gl.constexpr = shape[5]
    WIDE: gl.constexpr = wide.block_shape[1]
    ROTARY: gl.constexpr = narrow.block_shape[1]
    turn = gl.program_id(0) * 0
    num_items = gl.program_id(0) * 0
    place, last = _places_of(walk, shape[0], shape[7])
    while place < last:
        rows, context, table_row, keys, partial, is_whole, place = _piece_at(
            walk, place, last, shape[0], shape[3], shape[7]
        )
        first, end = keys
        if first < end:
            p_row = p_table + table_row.to(gl.int64) * stride_table
            page = gl.load(p_row + first // PAGE)
            hopper.mbarrier.wait(q_free.index(0), (num_items & 1) ^ 1)
            hopper.mbarrier.expect(
                q_ready.index(0), 4 * q_wide.block_type.nbytes + q_narrow.block_type.nbytes
            )
            for i in gl.static_range(4):
                hopper.tma.async_copy_global_to_shared(
                    q_wide, [rows[0], i * WIDE], q_ready.index(0), queries[0].index(i)
                )
            hopper.tma.async_copy_global_to_shared(
                q_narrow, [rows[0], 4 * WIDE], q_ready.index(0), queries[1]
            )
            num_items += 1
            for start in range(first, end, KEYS):
                row = page * BLOCK_ROWS + start % PAGE
                page = gl.load(p_row + gl.minimum(start + KEYS, end - 1) // PAGE)
                slot = turn % STAGES
                hopper.mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
                hopper.mbarrier.expect(
                    ready.index(slot), 4 * wide.block_type.nbytes + narrow.block_type.nbytes
                )
                for i in gl.static_range(4):
                    hopper.tma.async_copy_global_to_shared(
                        wide, [row, i * WIDE], ready.index(slot), ring[0].index(4 * slot + i)
                    )
                hopper.tma.async_copy_global_to_shared(
                    narrow, [row, 4 * WIDE], ready.index(slot), ring[1].index(slot)
                )
                turn += 1


@gluon.jit
def _score(memory, walk, p_partial_ml, qk_scale, shape: gl.constexpr):
    """Sends weights of each tile to the teams of values, and the factors by which they scale and
    merge what they have."""
    queries, ring, messages, barriers = memory
    ready, free, p_ready, p_free, q_ready, q_free = barriers
    HEADS: gl.constexpr = shape[0]
    SPLIT: gl.constexpr = shape[3]
    KEYS: gl.constexpr = shape[4]
    STAGES: gl.constexpr = shape[5]
    WEIGHTS: gl.constexpr = shape[6]
    ROWS: gl.constexpr = messages[0].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    row: gl.constexpr = gl.SliceLayout(1, layout)
    o_r = gl.arange(0, ROWS, layout=row)
    turn = gl.program_id(0) * 0
    sent = gl.program_id(0) * 0
    num_items = gl.program_id(0) * 0
    place, last = _places_of(walk, shape[0], shape[7])
    while place < last:
        rows, context, table_row, keys, partial, is_whole, place = _piece_at(
            walk, place, last, shape[0], shape[3], shape[7]
        )
        first, end = keys
        if first < end:
            num_tiles = (end - first + KEYS - 1) // KEYS
            b_position = context + (rows[2] + o_r) // HEADS
            hopper.mbarrier.wait(q_ready.index(0), num_items & 1)
            num_items += 1
            hopper.mbarrier.wait(ready.index(turn % STAGES), turn // STAGES & 1)
            b_s = _scores(queries, ring, turn % STAGES, layout)
            b_s = hopper.warpgroup_mma_wait(0, deps=[b_s])
            hopper.mbarrier.arrive(free.index(turn % STAGES), count=1)
            turn += 1
            b_m = gl.full([ROWS], float("-inf"), gl.float32, row)
            b_l = _columns(gl.full([ROWS, KEYS], 0.0, gl.float32, layout))
            b_m_all = gl.full([ROWS], float("-inf"), gl.float32, row)
            b_l_all = gl.full([ROWS], 0.0, gl.float32, row)
            for i in range(num_tiles - 1):
                slot = turn % STAGES
                hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
                b_next = _scores(queries, ring, slot, layout)
                state = (b_m, b_l, b_m_all, b_l_all)
                state = _weigh_tile(
                    messages, p_ready, p_free, sent, b_s, first + i * KEYS, i, b_position,
                    qk_scale, state, SPLIT, WEIGHTS,
                )  # fmt: skip
                b_m, b_l, b_m_all, b_l_all = state
                sent += 1
                b_s = hopper.warpgroup_mma_wait(0, deps=[b_next])
                hopper.mbarrier.arrive(free.index(slot), count=1)
                turn += 1
            hopper.mbarrier.arrive(q_free.index(0), count=1)
            i = num_tiles - 1
            state = (b_m, b_l, b_m_all, b_l_all)
            b_m, b_l, b_m_all, b_l_all = _weigh_tile(
                messages, p_ready, p_free, sent, b_s, first + i * KEYS, i, b_position,
                qk_scale, state, SPLIT, WEIGHTS,
            )  # fmt: skip
            sent += 1
            b_m, b_l, b_old, b_new = _merged(b_m_all, b_l_all, b_m, b_l)
            slot = sent % WEIGHTS
            hopper.mbarrier.wait(p_free.index(slot), (sent // WEIGHTS & 1) ^ 1)
            messages[1].index(3 * slot).store(1.0 / b_l)
            messages[1].index(3 * slot + 1).store(b_old)
            messages[1].index(3 * slot + 2).store(b_new)
            gl.thread_barrier()
            hopper.mbarrier.arrive(p_ready.index(slot), count=1)
            sent += 1
            if not is_whole:
                o_ml = (partial + o_r).to(gl.int64) * 2
                gl.store(p_partial_ml + o_ml, b_m, mask=o_r < rows[1])
                gl.store(p_partial_ml + o_ml + 1, b_l, mask=o_r < rows[1])


@gluon.jit
def _scores(queries, ring, slot, layout: gl.constexpr):
    KEYS: gl.constexpr = ring[0].shape[1]
    b_s = gl.full([queries[1].shape[0], KEYS], 0.0, gl.float32, layout)
    for i in gl.static_range(4):
        keys = ring[0].index(4 * slot + i).permute((1, 0))
        b_s = hopper.warpgroup_mma(queries[0].index(i), keys, b_s, use_acc=i > 0, is_async=True)
    keys = ring[1].index(slot).permute((1, 0))
    return hopper.warpgroup_mma(queries[1], keys, b_s, is_async=True)


@gluon.jit
def _weigh_tile(
    messages,
    p_ready,
    p_free,
    sent,
    b_s,
    first,
    i,
    b_position,
    qk_scale,
    state,
    SPLIT: gl.constexpr,
    WEIGHTS: gl.constexpr,
):
    """Computes `latent_tiles.weigh_tile` of tile i, whose keys start at position `first`, and sends
    it."""
    b_m, b_l, b_m_all, b_l_all = state
    KEYS: gl.constexpr = b_s.shape[1]
    slot = sent % WEIGHTS
    starts_split = (first % SPLIT == 0) & (i > 0)
    o_n = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, b_s.type.layout))
    b_s = gl.where(o_n[None, :] <= b_position[:, None], b_s, float("-inf"))
    b_top = gl.floor(gl.max(b_s, axis=1) * qk_scale * (1.0 / GRAIN)) * GRAIN
    b_old_m = gl.where(starts_split, float("-inf"), b_m)
    b_m_new = gl.maximum(b_old_m, b_top)
    b_shift = finite(b_m_new)
    b_p = weigh(b_s, qk_scale, b_shift)
    b_alpha = gl.exp2(b_old_m - b_shift)
    b_l_new = gl.fma(b_l, spread(b_alpha, b_l), _columns(b_p))
    hopper.mbarrier.wait(p_free.index(slot), (sent // WEIGHTS & 1) ^ 1)
    if starts_split:
        b_m_all, b_l_all, b_old, b_new = _merged(b_m_all, b_l_all, b_m, b_l)
        messages[1].index(3 * slot + 1).store(b_old)
        messages[1].index(3 * slot + 2).store(b_new)
    messages[0].index(slot).store(b_p.to(messages[0].dtype))
    # NOTE: values of a tile that starts a state replace what was there, and nothing is scaled.
    messages[1].index(3 * slot).store(gl.where(b_old_m == float("-inf"), 1.0, b_alpha))
    hopper.fence_async_shared()
    gl.thread_barrier()
    hopper.mbarrier.arrive(p_ready.index(slot), count=1)
    return b_m_new, b_l_new, b_m_all, b_l_all


@gluon.jit
def _columns(b_x):
    """Folds [ROWS, KEYS] to [ROWS, 16]."""
    b_x = fold(b_x)
    if b_x.shape[1] > 16:
        b_x = fold(b_x)
    return b_x


@gluon.jit
def _merged(b_m, b_l, b_m_next, b_l_next):
    """Maximum and sum [ROWS] of `online_softmax.merge_states`, and the factors of its values."""
    b_l_next = gl.convert_layout(row_sums(b_l_next), b_l.type.layout)
    b_m_new = gl.maximum(b_m, b_m_next)
    b_shift = finite(b_m_new)
    b_old = gl.exp2(b_m - b_shift)
    b_new = gl.exp2(b_m_next - b_shift)
    return b_m_new, gl.fma(b_l, b_old, b_l_next * b_new), b_old, b_new


@gluon.jit
def _add_values(memory, walk, p_total, p_out, HALF: gl.constexpr, shape: gl.constexpr):
    """Adds up one half of the values' numbers."""
    queries, ring, messages, barriers = memory
    ready, free, p_ready, p_free, q_ready, q_free = barriers
    SPLIT: gl.constexpr = shape[3]
    KEYS: gl.constexpr = shape[4]
    STAGES: gl.constexpr = shape[5]
    WEIGHTS: gl.constexpr = shape[6]
    ROWS: gl.constexpr = messages[0].shape[1]
    WIDE: gl.constexpr = ring[0].shape[2]
    RANK: gl.constexpr = 4 * WIDE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    row: gl.constexpr = gl.SliceLayout(1, layout)
    o_r = gl.arange(0, ROWS, layout=row)
    o_d = 2 * HALF * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))
    turn = gl.program_id(0) * 0
    sent = gl.program_id(0) * 0
    place, last = _places_of(walk, shape[0], shape[7])
    while place < last:
        rows, context, table_row, keys, partial, is_whole, place = _piece_at(
            walk, place, last, shape[0], shape[3], shape[7]
        )
        first, end = keys
        if first < end:
            num_tiles = (end - first + KEYS - 1) // KEYS
            o_total = (partial + o_r).to(gl.int64)[:, None] * RANK + o_d[None, :]
            is_row = (o_r < rows[1])[:, None]
            b_left = gl.full([ROWS, WIDE], 0.0, gl.float32, layout)
            b_right = gl.full([ROWS, WIDE], 0.0, gl.float32, layout)
            for i in range(num_tiles):
                slot = turn % STAGES
                w_slot = sent % WEIGHTS
                starts_split = (first + i * KEYS) % SPLIT == 0
                hopper.mbarrier.wait(p_ready.index(w_slot), sent // WEIGHTS & 1)
                if starts_split & (i > 0):
                    p_left = p_total + o_total
                    b_old = messages[1].index(3 * w_slot + 1).load(row)
                    b_new = messages[1].index(3 * w_slot + 2).load(row)
                    has_total = is_row & (i * KEYS > SPLIT)
                    b_left = _merge(p_left, has_total, b_old, b_new, b_left)
                    gl.store(p_left, b_left, mask=is_row)
                    b_right = _merge(p_left + WIDE, has_total, b_old, b_new, b_right)
                    gl.store(p_left + WIDE, b_right, mask=is_row)
                b_alpha = messages[1].index(3 * w_slot).load(row)
                b_left = scaled(b_left, b_alpha)
                b_right = scaled(b_right, b_alpha)
                hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
                b_p = messages[0].index(w_slot)
                goes_on = (first + i * KEYS) % SPLIT != 0
                left = ring[0].index(4 * slot + 2 * HALF)
                right = ring[0].index(4 * slot + 2 * HALF + 1)
                b_left = hopper.warpgroup_mma(b_p, left, b_left, use_acc=goes_on, is_async=True)
                b_right = hopper.warpgroup_mma(b_p, right, b_right, use_acc=goes_on, is_async=True)
                b_left, b_right = hopper.warpgroup_mma_wait(0, deps=[b_left, b_right])
                gl.thread_barrier()
                hopper.mbarrier.arrive(p_free.index(w_slot), count=1)
                hopper.mbarrier.arrive(free.index(slot), count=1)
                turn += 1
                sent += 1
            w_slot = sent % WEIGHTS
            hopper.mbarrier.wait(p_ready.index(w_slot), sent // WEIGHTS & 1)
            b_scale = messages[1].index(3 * w_slot).load(row)
            b_old = messages[1].index(3 * w_slot + 1).load(row)
            b_new = messages[1].index(3 * w_slot + 2).load(row)
            gl.thread_barrier()
            hopper.mbarrier.arrive(p_free.index(w_slot), count=1)
            sent += 1
            if end - first > SPLIT:
                b_left = _merge(p_total + o_total, is_row, b_old, b_new, b_left)
                b_right = _merge(p_total + o_total + WIDE, is_row, b_old, b_new, b_right)
            if is_whole:
                o_out = (rows[0] + o_r).to(gl.int64)[:, None] * RANK + o_d[None, :]
                dtype: gl.constexpr = p_out.dtype.element_ty
                gl.store(p_out + o_out, (b_left * b_scale[:, None]).to(dtype), mask=is_row)
                gl.store(p_out + o_out + WIDE, (b_right * b_scale[:, None]).to(dtype), mask=is_row)
            else:
                gl.store(p_total + o_total, b_left, mask=is_row)
                gl.store(p_total + o_total + WIDE, b_right, mask=is_row)


@gluon.jit
def _merge(p_total, has_total, b_old, b_new, b_acc):
    """Values of `online_softmax.merge_states`: of what waits in device memory, and of a split that
    ended."""
    b_total = gl.load(p_total, mask=has_total, other=0.0)
    return gl.fma(b_total, spread(b_old, b_acc), b_acc * b_new[:, None])
