"""Decode attention of some dozen rows on Hopper, and of any number with wide heads: the splits of
`decode_attention`, to the bit, without a pause between them.

A warp copies the keys and values of a program's items into one ring, one item after another: keys
of the next item are on their way while one ends, and those of the first before the previous kernel
has ended. That counts where rows are few or short, and where heads are so wide that shared memory
holds the ring of a single program.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..launch import dependent_launch
from ..launch.device import num_multiprocessors
from ..launch.hopper_copies import make_barriers, release_dependents, wait_for_inputs
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
from .hopper_decode_attention import merge_states, row_sums, scores, store_partial, weighted
from .hopper_rings import as_ring_source, finish_reads
from .online_softmax import TILE, base_2_scale
from .paged_cache import head_constants

PART = 32
"""Number of keys that are copied at once, a quarter of a tile: on average half as many are read
past the end of a row."""
NUM_STAGES = 3
"""Number of ring stages; a stage holds the keys of a tile or its values. Two, with three programs a
multiprocessor, are too few."""
RESIDENT_PROGRAMS = 2
"""Number of programs that fit on a multiprocessor, by registers and shared memory."""
MAX_REGISTERS = 128
WIDE_HEAD = 256
"""Dimensions of heads of which one program fits on a multiprocessor."""


def hopper_decode_splits(
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
    """Arguments as in `decode_attention`, without scales; `reduce_splits` follows. With
    `dependent`, the previous kernel may still be writing queries and the newest keys and values,
    and nothing else that is read here."""
    assert q.is_contiguous()
    assert out.is_contiguous()
    num_rows, _, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    assert plan.folded is None or not window
    resident = 1 if head_dim >= WIDE_HEAD else RESIDENT_PROGRAMS
    num_programs = min(
        num_rows * plan.max_splits * num_kv_heads, resident * num_multiprocessors(q.device)
    )
    _decode_items[(num_programs,)](
        q,
        as_ring_source(k_cache, PART),
        as_ring_source(v_cache, PART),
        block_tables,
        table_rows,
        seq_lens,
        plan.counts,
        plan.items,
        plan.tails,
        plan.first_partials,
        plan.folded,
        plan.partial_acc,
        plan.partial_ml,
        out,
        sinks,
        base_2_scale(scale, head_dim),
        block_tables.stride(0),
        **head_constants(q, k_cache),
        TILE=TILE,
        PART=PART,
        STAGES=NUM_STAGES,
        WINDOW=window,
        DEPENDENT=dependent,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        **dependent_launch.launch_options(dependent),
    )


@gluon.jit
def _decode_items(
    p_q,
    k,
    v,
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
    p_sinks,
    qk_scale,
    stride_table,
    BLOCK_ROWS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    TILE: gl.constexpr,
    PART: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    gl.static_assert(TILE == 4 * PART)
    gl.static_assert(GROUP <= 16)
    ring = gl.allocate_shared_memory(k.dtype, [4 * STAGES, PART, HEAD_DIM], k.layout)
    ready, free = make_barriers(STAGES, READY=1, FREE=1)
    # Lengths and lists are older than the kernel before this one, queries and the newest keys are
    # not.
    num_whole = gl.load(p_count)
    lists = (p_item, p_tail, num_whole, num_whole + gl.load(p_count + 1))
    rings = (ring, ready, free)
    shape: gl.constexpr = (
        NUM_KV_HEADS,
        GROUP,
        HEAD_DIM,
        PAGE,
        SPLIT,
        TILE,
        PART,
        STAGES,
        BLOCK_ROWS,
        WINDOW,
    )
    tables = (p_table, p_table_row, stride_table)
    results = (p_first_partial, p_partial_acc, p_partial_ml, p_out, p_sinks)
    gl.warp_specialize(
        [
            (
                _attend_items,
                (lists, rings, p_q, p_seq_len, p_folded, results, qk_scale, DEPENDENT, shape),
            ),
            (_copy_items, (lists, rings, k, v, tables, p_seq_len, p_folded, DEPENDENT, shape)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _task_of(i_round):
    """The task of a program in each round, in alternating order: items of lists that are ordered by
    length add up alike."""
    last = gl.num_programs(0) - 1
    i_program = gl.program_id(0)
    return i_round * gl.num_programs(0) + gl.where(i_round % 2 == 1, last - i_program, i_program)


@gluon.jit
def _ask_for_item(lists, i_item):
    """Loads the list entries of an item, in two parts whose sum it is: nothing waits for them
    yet."""
    p_item, p_tail, num_whole, num_items = lists
    whole = gl.load(p_item + i_item, mask=i_item < num_whole, other=0)
    tail = gl.load(
        p_tail + i_item - num_whole, mask=(i_item >= num_whole) & (i_item < num_items), other=0
    )
    return whole, tail


@gluon.jit
def _split_of(item):
    """Row and split of an item."""
    return (item[0] + item[1]) >> 16, (item[0] + item[1]) & 0xFFFF


@gluon.jit
def _num_splits(p_folded, i_row, i_split):
    """Number of splits of an item that begins with i_split: the first split of a row stands for all
    that are folded."""
    return 1 if p_folded is None else gl.load(p_folded + i_row, mask=i_split == 0, other=1)


@gluon.jit
def _copy_items(
    lists, rings, k, v, tables, p_seq_len, p_folded, DEPENDENT: gl.constexpr, shape: gl.constexpr
):
    """Fills the ring with keys and values in turn."""
    p_table, p_table_row, stride_table = tables
    NUM_KV_HEADS: gl.constexpr = shape[0]
    PAGE: gl.constexpr = shape[3]
    TILE: gl.constexpr = shape[5]
    PART: gl.constexpr = shape[6]
    BLOCK_ROWS: gl.constexpr = shape[8]
    turn = gl.program_id(0) * 0
    num_tasks = lists[3] * NUM_KV_HEADS
    for i_round in range(0, gl.cdiv(num_tasks, gl.num_programs(0))):
        i_task = _task_of(i_round)
        if i_task < num_tasks:
            i_row, i_split = _split_of(_ask_for_item(lists, i_task // NUM_KV_HEADS))
            i_kv = i_task % NUM_KV_HEADS
            seq_len = gl.load(p_seq_len + i_row)
            p_row = p_table + gl.load(p_table_row + i_row).to(gl.int64) * stride_table
            num_splits = _num_splits(p_folded, i_row, i_split)
            first, end, _ = _keys_of(i_split, num_splits, seq_len, shape)
            # A part past the end is the last one again.
            last = (end - 1) // PART * PART
            for start in range(first, last + 1, TILE):
                middle = gl.minimum(start + 2 * PART, last)
                left = gl.load(p_row + start // PAGE) * BLOCK_ROWS + i_kv * PAGE
                right = gl.load(p_row + middle // PAGE) * BLOCK_ROWS + i_kv * PAGE
                origins = (
                    left + start % PAGE,
                    left + gl.minimum(start + PART, last) % PAGE,
                    right + middle % PAGE,
                    right + gl.minimum(start + 3 * PART, last) % PAGE,
                )
                if start + TILE >= seq_len:
                    # The newest position is in this tile.
                    wait_for_inputs(DEPENDENT)
                _copy(k, origins, rings, turn, shape)
                _copy(v, origins, rings, turn + 1, shape)
                turn += 2
    # Programs without work wait too, so that this kernel ends only after the one before it.
    wait_for_inputs(DEPENDENT)


@gluon.jit
def _copy(source, origins, rings, turn, shape: gl.constexpr):
    ring, ready, free = rings
    STAGES: gl.constexpr = shape[7]
    slot = turn % STAGES
    hopper.mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
    hopper.mbarrier.expect(ready.index(slot), 4 * source.block_type.nbytes)
    for i in gl.static_range(4):
        hopper.tma.async_copy_global_to_shared(
            source, [origins[i], 0], ready.index(slot), ring.index(4 * slot + i)
        )


@gluon.jit
def _attend_items(
    lists,
    rings,
    p_q,
    p_seq_len,
    p_folded,
    results,
    qk_scale,
    DEPENDENT: gl.constexpr,
    shape: gl.constexpr,
):
    NUM_KV_HEADS: gl.constexpr = shape[0]
    GROUP: gl.constexpr = shape[1]
    HEAD_DIM: gl.constexpr = shape[2]
    SPLIT: gl.constexpr = shape[4]
    TILE: gl.constexpr = shape[5]
    PART: gl.constexpr = shape[6]
    NUM_Q_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    ROWS: gl.constexpr = 16
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    row: gl.constexpr = gl.SliceLayout(1, mma)
    # Each thread has a whole row, so that it folds splits without other threads.
    flat: gl.constexpr = gl.BlockedLayout([1, PART], [32, 1], [4, 1], [1, 0])
    p_first_partial, p_partial_acc, p_partial_ml, p_out, p_sinks = results
    o_r = gl.arange(0, ROWS, layout=row)
    o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, mma))
    o_q = o_r[:, None] * HEAD_DIM + o_d[None, :]
    is_head = o_r < GROUP
    i_task = gl.program_id(0)
    turn = gl.program_id(0) * 0
    i_round = gl.program_id(0) * 0
    i_row, i_split = _split_of(_ask_for_item(lists, i_task // NUM_KV_HEADS))
    facts = (p_seq_len, p_first_partial, p_folded)
    seq_len, first_partial, num_splits = _facts(facts, i_row, i_split)
    first_q = _first_query(i_row, i_task, shape)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    b_q = gl.load(p_q + first_q + o_q, mask=is_head[:, None], other=0.0)
    while i_task < lists[3] * NUM_KV_HEADS:
        # The next item and its queries are looked up while this one is computed.
        i_round += 1
        i_next = _task_of(i_round)
        next_item = _ask_for_item(lists, i_next // NUM_KV_HEADS)
        first, end, oldest = _keys_of(i_split, num_splits, seq_len, shape)
        b_query = gl.convert_layout(b_q, gl.DotOperandLayout(0, mma, 2))
        folded, b_m, b_l, b_acc = _fresh_states(ROWS, mma, flat, shape)
        b_last = gl.full([ROWS], 0, gl.int32, row) + end - 1
        for start in range(first, end, TILE):
            if p_folded is not None:
                folded, b_m, b_l, b_acc = _fold_split(
                    folded, start, first, b_m, b_l, b_acc, mma, flat, shape
                )
            b_m, b_l, b_acc = _attend(
                b_query,
                rings,
                turn,
                start,
                (oldest, b_last),
                qk_scale,
                b_m,
                b_l,
                b_acc,
                flat,
                shape,
            )
            turn += 2
        next_row, next_split = _split_of(next_item)
        next_len, next_partial, num_splits = _facts(facts, next_row, next_split)
        next_q = _first_query(next_row, i_next, shape)
        b_q = gl.load(p_q + next_q + o_q, mask=is_head[:, None], other=0.0)

        b_sum = gl.convert_layout(row_sums(b_l), row)
        if p_folded is not None:
            b_m, b_sum, b_acc = _end_fold(
                folded, b_m, b_sum, b_acc, (i_split == 0) & (seq_len > SPLIT)
            )
        if seq_len <= SPLIT if p_folded is None else (i_split == 0) & (end == seq_len):
            o_head = i_task % NUM_KV_HEADS * GROUP + o_r
            b_sum = with_sinks(b_m, b_sum, p_sinks, o_head, is_head)
            b_out = b_acc * (1.0 / b_sum)[:, None]
            gl.store(p_out + first_q + o_q, b_out.to(p_out.dtype.element_ty), mask=is_head[:, None])
        else:
            o_partials = first_partial * NUM_Q_HEADS + i_task % NUM_KV_HEADS * GROUP + o_r
            where = (p_partial_acc, p_partial_ml, o_partials, is_head, o_d)
            store_partial(where, i_split, b_m, b_sum, b_acc, NUM_Q_HEADS, HEAD_DIM)
        i_task = i_next
        i_split = next_split
        seq_len = next_len
        first_partial = next_partial
        first_q = next_q


@gluon.jit
def _keys_of(i_split, num_splits, seq_len, shape: gl.constexpr):
    """First and end position of an item of so many splits, whose first tile has keys that the row
    sees, and the oldest key that it sees."""
    SPLIT: gl.constexpr = shape[4]
    TILE: gl.constexpr = shape[5]
    WINDOW: gl.constexpr = shape[9]
    first = i_split * SPLIT
    end = gl.minimum(first + num_splits * SPLIT, seq_len)
    oldest = 0
    if WINDOW:
        oldest = oldest_key(seq_len - 1, WINDOW)
        first = gl.maximum(first, oldest // TILE * TILE)
    return first, end, oldest


@gluon.jit
def _facts(facts, i_row, i_split):
    """The length of a row, where its partial results begin, and the number of splits of the item
    that begins with i_split."""
    p_seq_len, p_first_partial, p_folded = facts
    return (
        gl.load(p_seq_len + i_row),
        gl.load(p_first_partial + i_row),
        _num_splits(p_folded, i_row, i_split),
    )


@gluon.jit
def _fresh_states(
    ROWS: gl.constexpr, layout: gl.constexpr, flat: gl.constexpr, shape: gl.constexpr
):
    """State of folded splits and of the one that begins, both empty."""
    b_m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    b_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, layout))
    b_l = fold(gl.full([ROWS, shape[6]], 0.0, gl.float32, flat))
    b_acc = gl.full([ROWS, shape[2]], 0.0, gl.float32, layout)
    return (b_m, b_sum, b_acc), b_m, b_l, b_acc


@gluon.jit
def _fold_split(
    folded,
    start,
    first,
    b_m,
    b_l,
    b_acc,
    layout: gl.constexpr,
    flat: gl.constexpr,
    shape: gl.constexpr,
):
    """Merges the state of a split into that of the ones before it where position `start` begins
    another split; returns both states."""
    if (start > first) & (start % shape[4] == 0):
        b_sum = gl.convert_layout(row_sums(b_l), b_m.type.layout)
        folded = merge_states(folded[0], folded[1], folded[2], b_m, b_sum, b_acc)
        _, b_m, b_l, b_acc = _fresh_states(b_m.shape[0], layout, flat, shape)
    return folded, b_m, b_l, b_acc


@gluon.jit
def _end_fold(folded, b_m, b_sum, b_acc, is_fold):
    """State of the last split, merged into that of the ones before it where `is_fold`. The first of
    several splits is such, and is stored as the merge leaves it; a later one is stored as it is."""
    b_m_new, b_sum_new, b_acc_new = merge_states(folded[0], folded[1], folded[2], b_m, b_sum, b_acc)
    b_m = gl.where(is_fold, b_m_new, b_m)
    b_sum = gl.where(is_fold, b_sum_new, b_sum)
    return b_m, b_sum, gl.where(is_fold, b_acc_new, b_acc)


@gluon.jit
def _first_query(i_row, i_task, shape: gl.constexpr):
    """Address of the queries of a row that a task's keys are for."""
    return (i_row * shape[0] + i_task % shape[0]) * (shape[1] * shape[2])


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
    """Computes `online_softmax.attend_tile` of the tile from position `first` on, in quarters.
    `seen`: the oldest position that is seen, and the last ones."""
    oldest, b_last = seen
    ring, ready, free = rings
    PART: gl.constexpr = shape[6]
    STAGES: gl.constexpr = shape[7]
    keys = turn % STAGES
    values = (turn + 1) % STAGES
    hopper.mbarrier.wait(ready.index(keys), turn // STAGES & 1)
    b_0 = scores(b_q, ring.index(4 * keys), PART)
    b_1 = scores(b_q, ring.index(4 * keys + 1), PART)
    b_2 = scores(b_q, ring.index(4 * keys + 2), PART)
    b_3 = scores(b_q, ring.index(4 * keys + 3), PART)
    finish_reads()
    hopper.mbarrier.arrive(free.index(keys), count=1)
    b_0, b_1 = hide(b_0, b_1, first, b_last, PART)
    b_2, b_3 = hide(b_2, b_3, first + 2 * PART, b_last, PART)
    if shape[9]:
        b_0, b_1 = hide_old(b_0, b_1, first, oldest, PART)
        b_2, b_3 = hide_old(b_2, b_3, first + 2 * PART, oldest, PART)
    b_m_new = gl.maximum(b_m, reference(gl.maximum(b_0, b_2), gl.maximum(b_1, b_3), qk_scale))
    b_shift = finite(b_m_new)
    b_0 = weigh(b_0, qk_scale, b_shift)
    b_1 = weigh(b_1, qk_scale, b_shift)
    b_2 = weigh(b_2, qk_scale, b_shift)
    b_3 = weigh(b_3, qk_scale, b_shift)
    b_alpha = gl.exp2(b_m - b_shift)
    # The right half of the tile is added to the left one, then the right half of the sum.
    b_sums = fold(gl.convert_layout((b_0 + b_2) + (b_1 + b_3), flat))
    b_l = gl.fma(b_l, spread(b_alpha, b_l), b_sums)
    b_acc = b_acc * spread(b_alpha, b_acc)
    hopper.mbarrier.wait(ready.index(values), (turn + 1) // STAGES & 1)
    b_acc = weighted(b_0.to(ring.dtype), ring.index(4 * values), b_acc)
    b_acc = weighted(b_1.to(ring.dtype), ring.index(4 * values + 1), b_acc)
    b_acc = weighted(b_2.to(ring.dtype), ring.index(4 * values + 2), b_acc)
    b_acc = weighted(b_3.to(ring.dtype), ring.index(4 * values + 3), b_acc)
    finish_reads()
    hopper.mbarrier.arrive(free.index(values), count=1)
    return b_m_new, b_l, b_acc
