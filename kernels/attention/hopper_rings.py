"""Rings of tiles in shared memory, filled by one warp for the warp groups of an attention kernel
for Hopper. With an fp8 cache four warps fill them and convert to float16. Knows nothing about the
computation."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .online_softmax import HALF
from .paged_cache import as_pairs, rows_of


def as_ring_source(cache: torch.Tensor, num_keys: int = HALF) -> TensorDescriptor:
    """Descriptor of a cache of which `num_keys` keys are copied at a time."""
    cache = as_pairs(cache)
    width = cache.shape[3]
    layout = gl.NVMMASharedLayout.get_default_for([num_keys, width], gl.bfloat16)
    return TensorDescriptor.from_tensor(rows_of(cache), [num_keys, width], layout)


@gluon.jit
def make_rings(
    dtype: gl.constexpr, HALF: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr
):
    """Rings of tiles of keys and of values, two halves each, and barriers that say which are ready
    and which may be filled."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HEAD_DIM], dtype)
    k_ring = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, HEAD_DIM], layout)
    v_ring = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, HEAD_DIM], layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(k_ready.index(i), count=1)
        hopper.mbarrier.init(v_ready.index(i), count=1)
        hopper.mbarrier.init(k_free.index(i), count=2)
        hopper.mbarrier.init(v_free.index(i), count=2)
    hopper.fence_async_shared()
    return k_ring, v_ring, k_ready, v_ready, k_free, v_free


@gluon.jit
def finish_reads():
    """Ends a team's reads of shared memory that the copy engine writes next.

    NOTE: a barrier alone orders them only among threads. A load that was issued before it may still
    be under way, and the copy engine does not wait for it: its writes go through another proxy,
    which is what the fence is for.
    """
    hopper.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def copy_tiles(k, v, p_row, first, end, turn, i_kv, rings, shape: gl.constexpr):
    """Copies positions first … end - 1 of the sequence whose block list is p_row. The first tile
    has this turn in the rings. Blocks are looked up a tile ahead; past the end the last block is
    copied again. `shape`: BLOCK_ROWS, PAGE, HALF and STAGES."""
    BLOCK_ROWS: gl.constexpr = shape[0]
    PAGE: gl.constexpr = shape[1]
    HALF: gl.constexpr = shape[2]
    STAGES: gl.constexpr = shape[3]
    k_ring, v_ring, k_ready, v_ready, k_free, v_free = rings
    left = gl.load(p_row + first // PAGE)
    right = gl.load(p_row + gl.minimum(first + HALF, end - 1) // PAGE)
    for start in range(first, end, 2 * HALF):
        left_row = left * BLOCK_ROWS + i_kv * PAGE + start % PAGE
        right_row = right * BLOCK_ROWS + i_kv * PAGE + (start + HALF) % PAGE
        left = gl.load(p_row + gl.minimum(start + 2 * HALF, end - 1) // PAGE)
        right = gl.load(p_row + gl.minimum(start + 3 * HALF, end - 1) // PAGE)
        i = turn + (start - first) // (2 * HALF)
        slot = i % STAGES
        phase = (i // STAGES & 1) ^ 1
        hopper.mbarrier.wait(k_free.index(slot), phase)
        hopper.mbarrier.expect(k_ready.index(slot), 2 * k.block_type.nbytes)
        hopper.tma.async_copy_global_to_shared(
            k, [left_row, 0], k_ready.index(slot), k_ring.index(2 * slot)
        )
        hopper.tma.async_copy_global_to_shared(
            k, [right_row, 0], k_ready.index(slot), k_ring.index(2 * slot + 1)
        )
        hopper.mbarrier.wait(v_free.index(slot), phase)
        hopper.mbarrier.expect(v_ready.index(slot), 2 * v.block_type.nbytes)
        hopper.tma.async_copy_global_to_shared(
            v, [left_row, 0], v_ready.index(slot), v_ring.index(2 * slot)
        )
        hopper.tma.async_copy_global_to_shared(
            v, [right_row, 0], v_ready.index(slot), v_ring.index(2 * slot + 1)
        )


@gluon.jit
def make_pair_buffers(k):
    """Buffers for two halves of tiles of an fp8 cache in its own layout, and barriers that signal
    their arrival."""
    buffers = gl.allocate_shared_memory(k.dtype, [2, k.block_shape[0], k.block_shape[1]], k.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        hopper.mbarrier.init(arrived.index(i), count=1)
    hopper.fence_async_shared()
    return buffers, arrived


@gluon.jit
def widen_tiles(k, v, p_row, end, i_kv, rings, pairs, shape: gl.constexpr):
    """Like `copy_tiles`, for an fp8 cache from its first position on, by four warps: the copied
    bytes go through their registers into the rings, as float16."""
    BLOCK_ROWS: gl.constexpr = shape[0]
    PAGE: gl.constexpr = shape[1]
    HALF: gl.constexpr = shape[2]
    STAGES: gl.constexpr = shape[3]
    k_ring, v_ring, k_ready, v_ready, k_free, v_free = rings
    buffers, arrived = pairs
    where = (p_row, i_kv, end)
    left, right = _rows_of(where, 0, BLOCK_ROWS, PAGE, HALF)
    _ask(k, left, buffers, arrived, 0, True)
    _ask(k, right, buffers, arrived, 1, True)
    for i in range(0, (end + 2 * HALF - 1) // (2 * HALF)):
        slot = i % STAGES
        phase = (i // STAGES & 1) ^ 1
        has_next = (i + 1) * 2 * HALF < end
        next_left, next_right = _rows_of(where, (i + 1) * 2 * HALF, BLOCK_ROWS, PAGE, HALF)
        hopper.mbarrier.wait(k_free.index(slot), phase)
        _widen(buffers, arrived, 0, 0, k_ring.index(2 * slot))
        _ask(v, left, buffers, arrived, 0, True)
        _widen(buffers, arrived, 1, 0, k_ring.index(2 * slot + 1))
        _ask(v, right, buffers, arrived, 1, True)
        hopper.mbarrier.arrive(k_ready.index(slot), count=1)
        hopper.mbarrier.wait(v_free.index(slot), phase)
        _widen(buffers, arrived, 0, 1, v_ring.index(2 * slot))
        _ask(k, next_left, buffers, arrived, 0, has_next)
        _widen(buffers, arrived, 1, 1, v_ring.index(2 * slot + 1))
        _ask(k, next_right, buffers, arrived, 1, has_next)
        hopper.mbarrier.arrive(v_ready.index(slot), count=1)
        left = next_left
        right = next_right


@gluon.jit
def _rows_of(where, start, BLOCK_ROWS: gl.constexpr, PAGE: gl.constexpr, HALF: gl.constexpr):
    """Rows of the cache at which both halves of a tile begin."""
    p_row, i_kv, end = where
    left = gl.load(p_row + gl.minimum(start, end - 1) // PAGE)
    right = gl.load(p_row + gl.minimum(start + HALF, end - 1) // PAGE)
    left_row = left * BLOCK_ROWS + i_kv * PAGE + start % PAGE
    right_row = right * BLOCK_ROWS + i_kv * PAGE + (start + HALF) % PAGE
    return left_row, right_row


@gluon.jit
def _ask(source, row, buffers, arrived, which: gl.constexpr, pred):
    hopper.mbarrier.expect(arrived.index(which), source.block_type.nbytes, pred=pred)
    hopper.tma.async_copy_global_to_shared(
        source, [row, 0], arrived.index(which), buffers.index(which), pred=pred
    )


@gluon.jit
def _widen(buffers, arrived, which: gl.constexpr, phase: gl.constexpr, target):
    """Converts half a tile from its buffer into a ring, 16 rows at a time; afterwards the matrix
    unit may read it, and a copy overwrite the buffer."""
    HALF: gl.constexpr = buffers.shape[1]
    WIDTH: gl.constexpr = buffers.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = 8 * (32 * 8 // WIDTH)
    hopper.mbarrier.wait(arrived.index(which), phase)
    for first in gl.static_range(0, HALF, ROWS):
        b_pair = buffers.index(which).slice(first, ROWS, dim=0).load(layout)
        b_low, b_high = gl.inline_asm_elementwise(
            "{ .reg .b32 w; .reg .b16 a, b; prmt.b32 w, $2, 0, 0x3120; mov.b32 {a, b}, w;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r",
            [b_pair],
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
        rows = target.slice(first, ROWS, dim=0)
        rows.slice(0, WIDTH, dim=1).store(b_low)
        rows.slice(WIDTH, WIDTH, dim=1).store(b_high)
    hopper.fence_async_shared()
    gl.thread_barrier()
