"""Attention over latents on Hopper, of decoding rows and of prompts: the bits of
`latent_attention`.

A program owns 64 query rows, tokens times heads, and two teams of four warps take tiles of latents
in pairs: each team computes the scores and weights of one tile, and adds up one half of the values
of both. While one team is at its exponentials, the matrix unit works for the other. A warp copies
latents into shared memory, each of them once, for scores and for values. Merged splits of a program
wait in device memory for the next one: registers and shared memory are full."""

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

RANK = 512
ROTARY = 64
"""Numbers of a latent without and with a position, of models that this kernel serves."""
HALF = RANK // 2
"""Numbers of values that a team adds up."""
REGISTERS = 240
"""Registers of a thread of the second team; the first one has what is left."""

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
        _described(queries, [ROWS, HALF]),
        queries,
        _described(latents, [KEYS, HALF]),
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
    p_q,
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
    REGISTERS: gl.constexpr,
    DECODES: gl.constexpr,
):
    ROWS: gl.constexpr = q_wide.block_shape[0]
    HALF: gl.constexpr = wide.block_shape[1]
    ROTARY: gl.constexpr = narrow.block_shape[1]
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], wide.dtype)
    queries = gl.allocate_shared_memory(wide.dtype, [2, ROWS, HALF], q_wide.layout)
    # Two tiles, each in three parts: both halves of the values, and numbers with a position.
    latents = (
        gl.allocate_shared_memory(wide.dtype, [4, KEYS, HALF], wide.layout),
        gl.allocate_shared_memory(wide.dtype, [2, KEYS, ROTARY], narrow.layout),
    )
    # Weights of both tiles, and of rows: maxima after both, sums of the first team, factors.
    messages = (
        gl.allocate_shared_memory(wide.dtype, [2, ROWS, KEYS], weights),
        gl.allocate_shared_memory(gl.float32, [4, ROWS], vector),
    )
    # NOTE: each part is freed by the team that needs it last.
    parts = (_make_barriers(6, 1), _make_barriers(6, 1))
    loads = (_make_barriers(1, 1), _make_barriers(1, 2))
    sends = _make_barriers(3, 1)
    hopper.fence_async_shared()
    gl.thread_barrier()
    walk = (p_start, p_item, p_first, p_seq_len, p_table_row, p_query_start, num_parts)
    shape: gl.constexpr = (HEADS, SPLIT, DECODES, BLOCK_ROWS, PAGE)
    sources = (q_wide, wide, narrow, p_table, stride_table)
    given = (p_q, qk_scale)
    results = (p_total, p_partial, p_ml, p_out)
    gl.warp_specialize(
        [
            (_attend, (queries, latents, messages, parts, loads, sends, walk, given, results, 0, shape)),
            (_attend, (queries, latents, messages, parts, loads, sends, walk, given, results, 1, shape)),
            (_copy, (queries, latents, parts, loads, walk, sources, shape)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _make_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        hopper.mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _copy(queries, latents, parts, loads, walk, sources, shape: gl.constexpr):
    """Copies the latents of each piece, pair by pair of tiles, and the piece's queries. A tile that
    is not there is a copy of the one before; its weights are zeros."""
    ready, free = parts
    q_wide, wide, narrow, p_table, stride_table = sources
    BLOCK_ROWS: gl.constexpr = shape[3]
    PAGE: gl.constexpr = shape[4]
    KEYS: gl.constexpr = wide.block_shape[0]
    HALF: gl.constexpr = wide.block_shape[1]
    num_pairs = gl.program_id(0) * 0
    num_pieces = gl.program_id(0) * 0
    place, last = _places_of(walk, shape[0], shape[2])
    while place < last:
        piece = _piece_at(walk, place, last, shape[0], shape[1], shape[2])
        first, end = piece[3]
        if first < end:
            p_row = p_table + piece[2].to(gl.int64) * stride_table
            last_tile = first + (end - first - 1) // KEYS * KEYS
            page = gl.load(p_row + first // PAGE)
            hopper.mbarrier.wait(loads[1].index(0), (num_pieces & 1) ^ 1)
            num_pieces += 1
            hopper.mbarrier.expect(loads[0].index(0), 2 * q_wide.block_type.nbytes)
            for i in gl.static_range(2):
                hopper.tma.async_copy_global_to_shared(
                    q_wide, [piece[0][0], i * HALF], loads[0].index(0), queries.index(i)
                )
            for start in range(first, end, 2 * KEYS):
                for i in gl.static_range(2):
                    at = gl.minimum(start + i * KEYS, last_tile)
                    row = page * BLOCK_ROWS + at % PAGE
                    page = gl.load(p_row + gl.minimum(at + KEYS, last_tile) // PAGE)
                    for j in gl.static_range(3):
                        barrier = ready.index(3 * i + j)
                        hopper.mbarrier.wait(free.index(3 * i + j), (num_pairs & 1) ^ 1)
                        if j < 2:
                            hopper.mbarrier.expect(barrier, wide.block_type.nbytes)
                            hopper.tma.async_copy_global_to_shared(
                                wide, [row, j * HALF], barrier, latents[0].index(2 * i + j)
                            )
                        else:
                            hopper.mbarrier.expect(barrier, narrow.block_type.nbytes)
                            hopper.tma.async_copy_global_to_shared(
                                narrow, [row, 2 * HALF], barrier, latents[1].index(i)
                            )
                num_pairs += 1
        place = piece[6]


@gluon.jit
def _attend(
    queries, latents, messages, parts, loads, sends, walk, given, results,
    TEAM: gl.constexpr, shape: gl.constexpr,
):  # fmt: skip
    """Attention of a program's pieces: scores of every other tile, and half of the values."""
    num_pairs = gl.program_id(0) * 0
    num_pieces = gl.program_id(0) * 0
    place, last = _places_of(walk, shape[0], shape[2])
    while place < last:
        piece = _piece_at(walk, place, last, shape[0], shape[1], shape[2])
        if piece[3][0] < piece[3][1]:
            hopper.mbarrier.wait(loads[0].index(0), num_pieces & 1)
            num_pairs = _attend_piece(
                queries,
                latents,
                messages,
                parts,
                loads[1],
                sends,
                piece,
                num_pairs,
                num_pieces,
                given,
                results,
                TEAM,
                shape,
            )
            num_pieces += 1
        place = piece[6]


@gluon.jit
def _attend_piece(
    queries, latents, messages, parts, q_free, sends, piece, num_pairs, num_pieces, given, results,
    TEAM: gl.constexpr, shape: gl.constexpr,
):  # fmt: skip
    """One team's part of a piece. Returns the number of pairs of tiles so far."""
    ready, free = parts
    HEADS: gl.constexpr = shape[0]
    SPLIT: gl.constexpr = shape[1]
    ROWS: gl.constexpr = messages[0].shape[1]
    KEYS: gl.constexpr = messages[0].shape[2]
    HALF: gl.constexpr = latents[0].shape[2]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    row: gl.constexpr = gl.SliceLayout(1, scores)
    o_r = gl.arange(0, ROWS, layout=row)
    first, end = piece[3]
    is_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, values)) < piece[0][1]
    held = _rotated_queries(given[0], piece[0], latents[1].shape[2], 2 * HALF, scores)
    # Position of each row, and of the first one, and the scale of scores.
    query = (
        piece[1] + (piece[0][2] + o_r) // HEADS,
        piece[1] + piece[0][2] // HEADS,
        given[1],
    )
    b_acc = gl.full([ROWS, HALF], 0.0, gl.float32, values)
    b_m = gl.full([ROWS], float("-inf"), gl.float32, row)
    b_l = gl.full([ROWS], 0.0, gl.float32, row)
    # Maxima after the pair before, the team's own, columns of its sums, and sums of the split.
    state = (b_m, b_m, _columns(gl.full([ROWS, KEYS], 0.0, gl.float32, scores)), b_l)
    merged = (b_m, b_l)
    factors = (b_l, b_l)
    for start in range(first, end, 2 * KEYS):
        phase = num_pairs & 1
        starts_split = (start % SPLIT == 0) & (start > first)
        is_last = start + 2 * KEYS >= end
        ends_split = ((start + 2 * KEYS) % SPLIT == 0) | is_last
        zero = _zero()
        b_s = _scores(held, queries, latents, ready, phase, zero, TEAM, scores)
        if starts_split:
            merged, factors = _merge_rows(merged, state)
            state = (b_m, b_m, state[2], state[3])
        b_s = hopper.warpgroup_mma_wait(0, deps=[b_s])
        hopper.mbarrier.arrive(free.index(3 * TEAM + 2), count=1)
        hopper.mbarrier.arrive(q_free.index(0), count=1, pred=is_last)
        b_s, b_top = _masked(b_s, start + TEAM * KEYS, query)
        split = (starts_split, start - first <= SPLIT, ends_split, start % SPLIT != 0)
        where = (messages, latents, free, sends, phase, zero)
        wait = (results[0], is_row, factors)
        if TEAM == 0:
            state, b_acc = _take_first(where, b_s, b_top, query[2], split, state, wait, b_acc)
        else:
            state, b_acc = _take_second(where, b_s, b_top, query[2], split, state, wait, b_acc)
        b_acc = _add_values(messages, latents, zero, 1, TEAM, b_acc, start >= first)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
        hopper.mbarrier.arrive(free.index(3 + TEAM), count=1)
        num_pairs += 1
    merged, factors = _merge_rows(merged, state)
    if end - first > SPLIT:
        b_acc = _totals("finish", results[0], is_row, factors, b_acc, TEAM)
    if TEAM == 1:
        messages[1].index(3).store(1.0 / merged[1])
        hopper.mbarrier.arrive(sends.index(2), count=1)
        if not piece[5]:
            p_row = results[2] + (piece[4] + o_r).to(gl.int64) * 2
            gl.store(p_row, merged[0], mask=o_r < piece[0][1])
            gl.store(p_row + 1, merged[1], mask=o_r < piece[0][1])
    hopper.mbarrier.wait(sends.index(2), num_pieces & 1)
    _store(messages, piece, is_row, results, b_acc, TEAM)
    return num_pairs


@gluon.jit
def _take_first(where, b_s, b_top, qk_scale, split, state, wait, b_acc):
    """The first team's part of a pair: weighs the first tile, and adds values of it. Returns the
    state after the pair, and the values, to which those of the second tile are yet to be added."""
    messages, latents, free, sends, phase, zero = where
    starts_split, is_second, ends_split, goes_on = split
    b_m, b_m_own, b_l, b_l_split = state
    b_m_first = gl.maximum(b_m, b_top)
    b_p = weigh(b_s, qk_scale, finite(b_m_first))
    hopper.mbarrier.wait(free.index(1), phase ^ 1)
    messages[1].index(0).store(b_m_first)
    messages[0].index(0).store(b_p.to(messages[0].dtype))
    b_l = gl.fma(b_l, spread(gl.exp2(b_m_own - finite(b_m_first)), b_l), _columns(b_p))
    if ends_split:
        messages[1].index(2).store(gl.convert_layout(row_sums(b_l), b_top.type.layout))
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(sends.index(0), count=1)
    if starts_split:
        b_acc = _end_split(wait, is_second, b_acc, 0)
    b_acc = scaled(b_acc, _scale(b_m, b_m_first))
    b_acc = _add_values(messages, latents, zero, 0, 0, b_acc, goes_on)
    b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
    hopper.mbarrier.arrive(free.index(0), count=1)
    hopper.mbarrier.wait(sends.index(1), phase)
    b_m = messages[1].index(1).load(b_top.type.layout)
    return (b_m, b_m_first, b_l, b_l_split), scaled(b_acc, _scale(b_m_first, b_m))


@gluon.jit
def _take_second(where, b_s, b_top, qk_scale, split, state, wait, b_acc):
    """As `_take_first`, of the second team and tile, whose maxima follow those of the first."""
    messages, latents, free, sends, phase, zero = where
    starts_split, is_second, ends_split, goes_on = split
    b_m, b_m_own, b_l, b_l_split = state
    if starts_split:
        b_acc = _end_split(wait, is_second, b_acc, 1)
    hopper.mbarrier.wait(sends.index(0), phase)
    b_m_first = messages[1].index(0).load(b_top.type.layout)
    b_l_first = messages[1].index(2).load(b_top.type.layout)
    b_acc = scaled(b_acc, _scale(b_m, b_m_first))
    b_acc = _add_values(messages, latents, zero, 0, 1, b_acc, goes_on)
    b_m = gl.maximum(b_m_first, b_top)
    b_p = weigh(b_s, qk_scale, finite(b_m))
    hopper.mbarrier.wait(free.index(3), phase ^ 1)
    messages[1].index(1).store(b_m)
    messages[0].index(1).store(b_p.to(messages[0].dtype))
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(sends.index(1), count=1)
    b_l = gl.fma(b_l, spread(gl.exp2(b_m_own - finite(b_m)), b_l), _columns(b_p))
    if ends_split:
        b_sums = gl.convert_layout(row_sums(b_l), b_top.type.layout)
        b_l_split = b_l_first * gl.exp2(b_m_first - finite(b_m)) + b_sums
    b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
    hopper.mbarrier.arrive(free.index(1), count=1)
    return (b_m, b_m, b_l, b_l_split), scaled(b_acc, _scale(b_m_first, b_m))


@gluon.jit
def _masked(b_s, first, query):
    """Scores of the keys from `first` on without those that a row does not see, and the rounded
    maxima of rows."""
    b_position, first_position, qk_scale = query
    KEYS: gl.constexpr = b_s.shape[1]
    if first + KEYS - 1 > first_position:
        o_n = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, b_s.type.layout))
        b_s = gl.where(o_n[None, :] <= b_position[:, None], b_s, float("-inf"))
    return b_s, gl.floor(gl.max(b_s, axis=1) * qk_scale * (1.0 / GRAIN)) * GRAIN


@gluon.jit
def _merge_rows(merged, state):
    """Maxima and sums [ROWS] of `online_softmax.merge_states` where a split ended, and the factors
    of the values of both sides. Sums are those of the second team."""
    b_m = gl.maximum(merged[0], state[0])
    b_shift = finite(b_m)
    b_old = gl.exp2(merged[0] - b_shift)
    b_new = gl.exp2(state[0] - b_shift)
    return (b_m, gl.fma(merged[1], b_old, state[3] * b_new)), (b_old, b_new)


@gluon.jit
def _store(messages, piece, is_row, results, b_acc, TEAM: gl.constexpr):
    """Stores a team's half of a piece's values: of whole rows divided by their sums."""
    ROWS: gl.constexpr = b_acc.shape[0]
    HALF: gl.constexpr = b_acc.shape[1]
    row: gl.constexpr = gl.SliceLayout(1, b_acc.type.layout)
    o_r = gl.arange(0, ROWS, layout=row)
    o_d = TEAM * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, b_acc.type.layout))
    if piece[5]:
        b_acc = b_acc * messages[1].index(3).load(row)[:, None]
        p_rows = results[3] + (piece[0][0] + o_r).to(gl.int64)[:, None] * (2 * HALF) + o_d[None, :]
        gl.store(p_rows, b_acc.to(results[3].dtype.element_ty), mask=is_row[:, None])
    else:
        p_partials = results[1] + (piece[4] + o_r).to(gl.int64)[:, None] * (2 * HALF) + o_d[None, :]
        gl.store(p_partials, b_acc, mask=is_row[:, None])


@gluon.jit
def _rotated_queries(p_q, rows, ROTARY: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr):
    """Numbers with a position of a piece's queries: shared memory has no room for them."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    ROWS: gl.constexpr = 64
    o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, operand))
    o_t = RANK + gl.arange(0, ROTARY, layout=gl.SliceLayout(0, operand))
    p_rows = p_q + (rows[0] + o_r).to(gl.int64)[:, None] * (RANK + ROTARY) + o_t[None, :]
    return gl.load(p_rows, mask=(o_r < rows[1])[:, None], other=0.0)


@gluon.jit
def _scores(held, queries, latents, ready, phase, zero, TEAM: gl.constexpr, layout: gl.constexpr):
    """Scores of a team's tile, whose product may still run."""
    b_s = gl.full([queries.shape[1], latents[0].shape[1]], 0.0, gl.float32, layout)
    for i in gl.static_range(2):
        hopper.mbarrier.wait(ready.index(3 * TEAM + i), phase)
        keys = latents[0].index(zero + 2 * TEAM + i).permute((1, 0))
        b_s = hopper.warpgroup_mma(queries.index(zero + i), keys, b_s, use_acc=i > 0, is_async=True)
    hopper.mbarrier.wait(ready.index(3 * TEAM + 2), phase)
    keys = latents[1].index(zero + TEAM).permute((1, 0))
    return hopper.warpgroup_mma(held, keys, b_s, is_async=True)


@gluon.jit
def _add_values(messages, latents, zero, i: gl.constexpr, TEAM: gl.constexpr, b_acc, goes_on):
    """Adds a team's half of the values of tile i of a pair; the product may still run."""
    return hopper.warpgroup_mma(
        messages[0].index(zero + i),
        latents[0].index(zero + 2 * i + TEAM),
        b_acc,
        use_acc=goes_on,
        is_async=True,
    )


@gluon.jit
def _zero():
    """Zero as the compiler does not know it: places in shared memory that it knew would take
    registers for all of a loop."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _scale(b_m_old, b_m_new):
    """Factor of values whose maximum changes; there are none yet where it was minus infinity."""
    b_factor = gl.exp2(b_m_old - finite(b_m_new))
    return gl.where(b_m_old == float("-inf"), 1.0, b_factor)


@gluon.jit
def _columns(b_x):
    """Folds [ROWS, KEYS] to [ROWS, 16]."""
    return fold(fold(b_x))


@gluon.constexpr_function
def _on_totals(step):
    """Assembly of `_totals` for 64 numbers of a thread, two of a query row and two of the row eight
    below it in turn, and its constraints. Groups of four of neighbours lie side by side."""
    lines = [
        ".reg .pred p; .reg .b32 t; .reg .b64 a; .reg .f32 x0, x1, x2, x3;",
        "setp.ne.b32 p, $320, 0; mov.u32 t, %tid.x; and.b32 t, t, 127; mad.wide.u32 a, t, 16, $256;",
    ]
    for i in range(0, 64, 4):
        numbers = range(i, i + 4)
        store = f"st.global.v4.f32 [a+{i * 512}], {{{', '.join(f'${j}' for j in numbers)}}};"
        load = f"ld.global.cg.v4.f32 {{x0, x1, x2, x3}}, [a+{i * 512}];"
        scale = " ".join(f"mul.rn.f32 ${j}, ${j}, ${192 + j // 2 % 2 * 2};" for j in numbers)
        add = " ".join(
            f"fma.rn.f32 ${j}, x{j - i}, ${128 + j // 2 % 2 * 2}, ${j};" for j in numbers
        )
        # NOTE: branches keep the compiler from loading more than registers have room for.
        steps = {
            "start": f"@p {store}",
            "add": f"{scale} {{ @!p bra done; {load} {add} {store} done: }}",
            "finish": f"mov.f32 x0, 0f00000000; mov.f32 x1, x0; mov.f32 x2, x0; mov.f32 x3, x0; "
            f"{scale} @p {load} {add}",
        }
        lines.append(steps[step])
    constraints = ["=f"] * 64 + [str(i) for i in range(64)] + ["f"] * 128 + ["l"] * 64 + ["r"] * 64
    return "{ " + " ".join(lines) + " }", ",".join(constraints)


@gluon.jit
def _end_split(wait, is_second, b_acc, TEAM: gl.constexpr):
    """Merges the values of a split that ended. What it returns counts for nothing: the next split
    begins anew."""
    p_total, is_row, factors = wait
    if is_second:
        b_acc = _totals("start", p_total, is_row, factors, b_acc, TEAM)
    else:
        b_acc = _totals("add", p_total, is_row, factors, b_acc, TEAM)
    return b_acc


@gluon.jit
def _totals(STEP: gl.constexpr, p_total, is_row, factors, b_acc, TEAM: gl.constexpr):
    """Merges a team's half of a split's values [ROWS, HALF] with what waits in device memory, as
    `online_softmax.merge_states`. "start": they become that; "add": the sum becomes that; "finish":
    returns the sum. The values returned of the others count for nothing.

    Sums that the second-level cache makes, of which nothing is read, took longer."""
    ROWS: gl.constexpr = b_acc.shape[0]
    HALF: gl.constexpr = b_acc.shape[1]
    asm: gl.constexpr = _on_totals(STEP)
    o_d = gl.arange(0, HALF, layout=gl.SliceLayout(0, b_acc.type.layout))
    p_own = (p_total + (2 * gl.program_id(0) + TEAM) * (ROWS * HALF)).to(gl.int64)
    p_bases = p_own + (o_d // 128 * (4 * 128 * ROWS)).to(gl.int64)
    return gl.inline_asm_elementwise(
        asm[0],
        asm[1],
        [
            b_acc,
            spread(factors[0], b_acc),
            spread(factors[1], b_acc),
            p_bases[None, :],
            is_row[:, None].to(gl.int32),
        ],
        dtype=gl.float32,
        is_pure=False,
        pack=64,
    )
