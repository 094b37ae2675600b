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
REGISTERS = 160
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
        (plan.range_starts, plan.row_of_split, plan.first_partials, seq_lens, table_rows, seq_lens),
        block_tables,
        plan.num_ranges,
        (plan.totals, plan.partial_acc, plan.partial_ml),
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
        (totals, totals, totals),
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
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
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
    p_start,
    p_item,
    p_first,
    p_seq_len,
    p_table_row,
    p_query_start,
    p_table,
    p_total,
    p_partial,
    p_ml,
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
        gl.allocate_shared_memory(wide.dtype, [1, ROWS, ROTARY], q_narrow.layout),
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
    tiles = (_make_barriers(STAGES, 1), _make_barriers(STAGES, 3))
    sends = (_make_barriers(WEIGHTS, 1), _make_barriers(WEIGHTS, 2))
    loads = (_make_barriers(1, 1), _make_barriers(1, 1))
    hopper.fence_async_shared()
    gl.thread_barrier()
    walk = (p_start, p_item, p_first, p_seq_len, p_table_row, p_query_start, num_parts)
    shape: gl.constexpr = (HEADS, SPLIT, STAGES, WEIGHTS, DECODES, BLOCK_ROWS, PAGE)
    sources = (q_wide, q_narrow, wide, narrow, p_table, stride_table)
    results = (p_total, p_partial, p_out)
    score = (queries, ring, messages, tiles, sends, loads, walk, qk_scale, p_ml, shape)
    gl.warp_specialize(
        [
            (_score, score),
            (_add_values, (ring, messages, tiles, sends, walk, results, 0, shape)),
            (_add_values, (ring, messages, tiles, sends, walk, results, 1, shape)),
            (_copy, (queries, ring, tiles, loads, walk, sources, shape)),
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
def _copy(queries, ring, tiles, loads, walk, sources, shape: gl.constexpr):
    """Fills the ring with latents, and the place of queries with those of the next piece."""
    ready, free = tiles
    q_wide, q_narrow, wide, narrow, p_table, stride_table = sources
    STAGES: gl.constexpr = shape[2]
    BLOCK_ROWS: gl.constexpr = shape[5]
    PAGE: gl.constexpr = shape[6]
    KEYS: gl.constexpr = wide.block_shape[0]
    turn = gl.program_id(0) * 0
    num_pieces = gl.program_id(0) * 0
    place, last = _places_of(walk, shape[0], shape[4])
    while place < last:
        piece = _piece_at(walk, place, last, shape[0], shape[1], shape[4])
        first, end = piece[3]
        if first < end:
            p_row = p_table + piece[2].to(gl.int64) * stride_table
            page = gl.load(p_row + first // PAGE)
            hopper.mbarrier.wait(loads[1].index(0), (num_pieces & 1) ^ 1)
            _copy_rows(q_wide, q_narrow, piece[0][0], loads[0].index(0), queries, 0)
            num_pieces += 1
            for start in range(first, end, KEYS):
                row = page * BLOCK_ROWS + start % PAGE
                page = gl.load(p_row + gl.minimum(start + KEYS, end - 1) // PAGE)
                slot = turn % STAGES
                hopper.mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
                _copy_rows(wide, narrow, row, ready.index(slot), ring, slot)
                turn += 1
        place = piece[6]


@gluon.jit
def _copy_rows(wide, narrow, row, barrier, targets, slot):
    """Copies rows of 576 numbers, from `row` on."""
    WIDE: gl.constexpr = wide.block_shape[1]
    hopper.mbarrier.expect(barrier, 4 * wide.block_type.nbytes + narrow.block_type.nbytes)
    for i in gl.static_range(4):
        hopper.tma.async_copy_global_to_shared(
            wide, [row, i * WIDE], barrier, targets[0].index(4 * slot + i)
        )
    hopper.tma.async_copy_global_to_shared(narrow, [row, 4 * WIDE], barrier, targets[1].index(slot))


@gluon.jit
def _score(queries, ring, messages, tiles, sends, loads, walk, qk_scale, p_ml, shape: gl.constexpr):
    """Sends weights of each tile to the teams of values, and the factors by which they scale and
    merge what they have."""
    turn = gl.program_id(0) * 0
    sent = gl.program_id(0) * 0
    num_pieces = gl.program_id(0) * 0
    place, last = _places_of(walk, shape[0], shape[4])
    while place < last:
        piece = _piece_at(walk, place, last, shape[0], shape[1], shape[4])
        if piece[3][0] < piece[3][1]:
            hopper.mbarrier.wait(loads[0].index(0), num_pieces & 1)
            num_pieces += 1
            turn, sent = _score_piece(
                queries,
                ring,
                messages,
                tiles,
                sends,
                loads[1],
                piece,
                turn,
                sent,
                qk_scale,
                p_ml,
                shape,
            )
        place = piece[6]


@gluon.jit
def _score_piece(
    queries, ring, messages, tiles, sends, q_free, piece, turn, sent, qk_scale, p_ml, shape: gl.constexpr
):  # fmt: skip
    """Scores of a piece's tiles, each beside the weights of the tile before. Returns the turns that
    follow, of tiles and of what is sent."""
    ready, free = tiles
    HEADS: gl.constexpr = shape[0]
    SPLIT: gl.constexpr = shape[1]
    STAGES: gl.constexpr = shape[2]
    WEIGHTS: gl.constexpr = shape[3]
    ROWS: gl.constexpr = messages[0].shape[1]
    KEYS: gl.constexpr = messages[0].shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    row: gl.constexpr = gl.SliceLayout(1, layout)
    o_r = gl.arange(0, ROWS, layout=row)
    first, end = piece[3]
    num_tiles = (end - first + KEYS - 1) // KEYS
    query = (piece[1] + (piece[0][2] + o_r) // HEADS, qk_scale)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    held = (
        queries[0].index(0).load(operand),
        queries[0].index(1).load(operand),
        queries[0].index(2).load(operand),
    )
    hopper.mbarrier.wait(ready.index(turn % STAGES), turn // STAGES & 1)
    b_s = _scores(held, queries, ring, turn % STAGES, layout)
    b_s = hopper.warpgroup_mma_wait(0, deps=[b_s])
    hopper.mbarrier.arrive(free.index(turn % STAGES), count=1)
    turn += 1
    b_m = gl.full([ROWS], float("-inf"), gl.float32, row)
    b_l = _columns(gl.full([ROWS, KEYS], 0.0, gl.float32, layout))
    b_m_all = gl.full([ROWS], float("-inf"), gl.float32, row)
    b_l_all = gl.full([ROWS], 0.0, gl.float32, row)
    state = (b_m, b_l, b_m_all, b_l_all)
    for i in range(num_tiles - 1):
        slot = turn % STAGES
        hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
        b_next = _scores(held, queries, ring, slot, layout)
        state = _weigh_tile(messages, sends, sent, b_s, first, i, query, state, SPLIT, WEIGHTS)
        b_s = hopper.warpgroup_mma_wait(0, deps=[b_next])
        hopper.mbarrier.arrive(free.index(slot), count=1)
        sent += 1
        turn += 1
    hopper.mbarrier.arrive(q_free.index(0), count=1)
    i = num_tiles - 1
    state = _weigh_tile(messages, sends, sent, b_s, first, i, query, state, SPLIT, WEIGHTS)
    sent += 1
    b_m, b_l = _send_end(messages, sends, sent, state, WEIGHTS)
    if not piece[5]:
        p_row = p_ml + (piece[4] + o_r).to(gl.int64) * 2
        gl.store(p_row, b_m, mask=o_r < piece[0][1])
        gl.store(p_row + 1, b_l, mask=o_r < piece[0][1])
    return turn, sent + 1


@gluon.jit
def _scores(held, queries, ring, slot, layout: gl.constexpr):
    KEYS: gl.constexpr = ring[0].shape[1]
    b_s = gl.full([queries[0].shape[1], KEYS], 0.0, gl.float32, layout)
    for i in gl.static_range(4):
        keys = ring[0].index(4 * slot + i).permute((1, 0))
        if i < 3:
            b_s = hopper.warpgroup_mma(held[i], keys, b_s, use_acc=i > 0, is_async=True)
        else:
            b_s = hopper.warpgroup_mma(queries[0].index(i), keys, b_s, is_async=True)
    keys = ring[1].index(slot).permute((1, 0))
    return hopper.warpgroup_mma(queries[1].index(0), keys, b_s, is_async=True)


@gluon.jit
def _weigh_tile(
    messages, sends, sent, b_s, first, i, query, state, SPLIT: gl.constexpr, WEIGHTS: gl.constexpr
):  # fmt: skip
    """Weighs tile i of a piece, as `latent_tiles.attend_latents` does, and sends the weights.
    `state`: maximum and sums of the split, and of the splits before."""
    b_position, qk_scale = query
    b_m, b_l, b_m_all, b_l_all = state
    KEYS: gl.constexpr = b_s.shape[1]
    slot = sent % WEIGHTS
    start = first + i * KEYS
    starts_split = (start % SPLIT == 0) & (i > 0)
    o_n = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, b_s.type.layout))
    b_s = gl.where(o_n[None, :] <= b_position[:, None], b_s, float("-inf"))
    b_top = gl.floor(gl.max(b_s, axis=1) * qk_scale * (1.0 / GRAIN)) * GRAIN
    b_m_old = gl.where(starts_split, float("-inf"), b_m)
    b_m_new = gl.maximum(b_m_old, b_top)
    b_shift = finite(b_m_new)
    b_p = weigh(b_s, qk_scale, b_shift)
    b_alpha = gl.exp2(b_m_old - b_shift)
    b_l_new = gl.fma(b_l, spread(b_alpha, b_l), _columns(b_p))
    hopper.mbarrier.wait(sends[1].index(slot), (sent // WEIGHTS & 1) ^ 1)
    if starts_split:
        b_m_all, b_l_all, b_old, b_new = _merged(b_m_all, b_l_all, b_m, b_l)
        messages[1].index(3 * slot + 1).store(b_old)
        messages[1].index(3 * slot + 2).store(b_new)
    messages[0].index(slot).store(b_p.to(messages[0].dtype))
    # NOTE: values of a tile that starts a split replace what was there, and nothing is scaled.
    messages[1].index(3 * slot).store(gl.where(b_m_old == float("-inf"), 1.0, b_alpha))
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(sends[0].index(slot), count=1)
    return b_m_new, b_l_new, b_m_all, b_l_all


@gluon.jit
def _send_end(messages, sends, sent, state, WEIGHTS: gl.constexpr):
    """Merges the last split of a piece and sends the factors. Returns maximum and sum."""
    b_m, b_l, b_old, b_new = _merged(state[2], state[3], state[0], state[1])
    slot = sent % WEIGHTS
    hopper.mbarrier.wait(sends[1].index(slot), (sent // WEIGHTS & 1) ^ 1)
    messages[1].index(3 * slot).store(1.0 / b_l)
    messages[1].index(3 * slot + 1).store(b_old)
    messages[1].index(3 * slot + 2).store(b_new)
    hopper.mbarrier.arrive(sends[0].index(slot), count=1)
    return b_m, b_l


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
def _add_values(
    ring, messages, tiles, sends, walk, results, HALF: gl.constexpr, shape: gl.constexpr
):
    """Adds up one half of the values' numbers."""
    turn = gl.program_id(0) * 0
    sent = gl.program_id(0) * 0
    place, last = _places_of(walk, shape[0], shape[4])
    while place < last:
        piece = _piece_at(walk, place, last, shape[0], shape[1], shape[4])
        if piece[3][0] < piece[3][1]:
            turn, sent = _add_piece(
                ring, messages, tiles, sends, piece, turn, sent, results, HALF, shape
            )
        place = piece[6]


@gluon.jit
def _add_piece(
    ring, messages, tiles, sends, piece, turn, sent, results, HALF: gl.constexpr, shape: gl.constexpr
):  # fmt: skip
    """Adds up the values of a piece and stores them. Returns turns as `_score_piece`."""
    ready, free = tiles
    SPLIT: gl.constexpr = shape[1]
    STAGES: gl.constexpr = shape[2]
    WEIGHTS: gl.constexpr = shape[3]
    ROWS: gl.constexpr = messages[0].shape[1]
    KEYS: gl.constexpr = messages[0].shape[2]
    WIDE: gl.constexpr = ring[0].shape[2]
    RANK: gl.constexpr = 4 * WIDE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    row: gl.constexpr = gl.SliceLayout(1, layout)
    o_r = gl.arange(0, ROWS, layout=row)
    o_d = 2 * HALF * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))
    first, end = piece[3]
    is_row = (o_r < piece[0][1])[:, None]
    p_left = results[0] + (gl.program_id(0) * ROWS + o_r)[:, None] * RANK + o_d[None, :]
    b_left = gl.full([ROWS, WIDE], 0.0, gl.float32, layout)
    b_right = gl.full([ROWS, WIDE], 0.0, gl.float32, layout)
    hopper.mbarrier.wait(sends[0].index(sent % WEIGHTS), sent // WEIGHTS & 1)
    b_scale = messages[1].index(3 * (sent % WEIGHTS)).load(row)
    for start in range(first, end, KEYS):
        slot = turn % STAGES
        w_slot = sent % WEIGHTS
        goes_on = start % SPLIT != 0
        if (start % SPLIT == 0) & (start > first):
            b_old = messages[1].index(3 * w_slot + 1).load(row)
            b_new = messages[1].index(3 * w_slot + 2).load(row)
            is_first = start - first <= SPLIT
            b_left, b_right = _end_split(p_left, is_row, is_first, b_old, b_new, b_left, b_right)
        b_left = scaled(b_left, b_scale)
        b_right = scaled(b_right, b_scale)
        hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
        weights = messages[0].index(w_slot)
        left = ring[0].index(4 * slot + 2 * HALF)
        right = ring[0].index(4 * slot + 2 * HALF + 1)
        b_left = hopper.warpgroup_mma(weights, left, b_left, use_acc=goes_on, is_async=True)
        b_right = hopper.warpgroup_mma(weights, right, b_right, use_acc=goes_on, is_async=True)
        turn += 1
        sent += 1
        # What follows a tile is there before its product has ended: the next one, or the end.
        hopper.mbarrier.wait(sends[0].index(sent % WEIGHTS), sent // WEIGHTS & 1)
        b_scale = messages[1].index(3 * (sent % WEIGHTS)).load(row)
        b_left, b_right = hopper.warpgroup_mma_wait(0, deps=[b_left, b_right])
        hopper.mbarrier.arrive(sends[1].index(w_slot), count=1)
        hopper.mbarrier.arrive(free.index(slot), count=1)
    w_slot = sent % WEIGHTS
    b_old = messages[1].index(3 * w_slot + 1).load(row)
    b_new = messages[1].index(3 * w_slot + 2).load(row)
    hopper.mbarrier.arrive(sends[1].index(w_slot), count=1)
    if end - first > SPLIT:
        b_left = _merge(p_left, is_row, b_old, b_new, b_left)
        b_right = _merge(p_left + WIDE, is_row, b_old, b_new, b_right)
    if piece[5]:
        p_out = results[2]
        dtype: gl.constexpr = p_out.dtype.element_ty
        p_rows = p_out + (piece[0][0] + o_r).to(gl.int64)[:, None] * RANK + o_d[None, :]
        gl.store(p_rows, (b_left * b_scale[:, None]).to(dtype), mask=is_row)
        gl.store(p_rows + WIDE, (b_right * b_scale[:, None]).to(dtype), mask=is_row)
    else:
        p_partials = results[1] + (piece[4] + o_r).to(gl.int64)[:, None] * RANK + o_d[None, :]
        gl.store(p_partials, b_left, mask=is_row)
        gl.store(p_partials + WIDE, b_right, mask=is_row)
    return turn, sent + 1


@gluon.jit
def _end_split(p_left, is_row, is_first, b_old, b_new, b_left, b_right):
    """Merges a split that ended into what waits in device memory; the first one becomes that. What
    it returns counts for nothing: the next split begins anew."""
    WIDE: gl.constexpr = b_left.shape[1]
    if is_first:
        gl.store(p_left, b_left, mask=is_row)
        gl.store(p_left + WIDE, b_right, mask=is_row)
    elif gl.min(gl.where(b_old == 1.0, 1, 0), axis=0) == 1:
        # The sum is made in the second-level cache, and nothing waits for it. It takes sums below
        # 2 ** -126 for zeros.
        b_left = b_left * b_new[:, None]
        b_right = b_right * b_new[:, None]
        gl.atomic_add(p_left, b_left, mask=is_row, sem="relaxed")
        gl.atomic_add(p_left + WIDE, b_right, mask=is_row, sem="relaxed")
    else:
        b_left = _merge(p_left, is_row, b_old, b_new, b_left)
        gl.store(p_left, b_left, mask=is_row)
        b_right = _merge(p_left + WIDE, is_row, b_old, b_new, b_right)
        gl.store(p_left + WIDE, b_right, mask=is_row)
    return b_left, b_right


@gluon.jit
def _merge(p_total, has_total, b_old, b_new, b_acc):
    """Values of `online_softmax.merge_states`: of what waits in device memory, and of a split that
    ended."""
    b_total = gl.load(p_total, mask=has_total, other=0.0, cache_modifier=".cg")
    return gl.fma(b_total, spread(b_old, b_acc), b_acc * b_new[:, None])
