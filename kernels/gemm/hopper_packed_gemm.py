"""x @ weight.T with weights of four or eight bits on Hopper: the bits of `gemm` over the expanded
matrix.

Two warps fill rings of packed weights, scales and rows of x by the copy engine. A team of four
warps makes packed weights numbers in registers, from where the matrix unit takes them as the
operand with the many rows; while it multiplies 64 inputs, the next are unpacked. For many rows a
second team multiplies the same rows of x by weights of its own. K is never split, and its order is
that of `gemm`. Rows may be those of experts, whose weights follow one another.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..attention import hopper_attention
from ..launch import dependent_launch
from ..launch.hopper_copies import make_barriers, release_dependents, tiled, wait_for_inputs
from ..quant.unpacked_weights import (
    INT4_DIVISOR,
    beside,
    split_blocks,
    twice,
    unpack_float4,
    unpack_fp8,
    unpack_int4,
    unpack_int8,
    word_layout,
)
from .packed_tiles import BLOCK_N, RingTiles
from .packed_words import ALIGNMENT, TILE_WORDS, PackedWords, RowsOfExperts


def serves(x: torch.Tensor) -> bool:
    """Whether rows of this type and place are multiplied here."""
    return x.dtype == torch.bfloat16 and x.is_contiguous() and hopper_attention.is_hopper(x.device)


def hopper_packed_gemm(
    x: torch.Tensor,
    weight: PackedWords,
    out: torch.Tensor,
    tiles: RingTiles,
    experts: RowsOfExperts | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N]; with experts, whose tiles
    have at most `block_m` rows, the weight is theirs, [E N, K]."""
    m, (num_weights, k) = x.shape[0], weight.shape
    n = out.shape[1]
    assert num_weights == n * (1 if experts is None else experts.num_experts)
    assert n % ALIGNMENT == 0
    tile_k = TILE_WORDS * 32 // weight.bits
    assert serves(x)
    assert weight.is_whole
    assert out.is_contiguous()
    # The copy engine fills the last stage up with zeros: scales, words and rows.
    is_whole = not weight.is_float4
    num_tiles = next(
        each
        for each in (tiles.num_tiles, 4, 2, 1)
        if each * tile_k <= k and not (is_whole and k % (each * tile_k))
    )
    block_k = num_tiles * tile_k
    block_g = 2 * BLOCK_N if weight.is_float4 else max(tiles.block_n, BLOCK_N)
    num_tiles_m = triton.cdiv(m, tiles.block_m) if experts is None else experts.most_tiles
    _hopper_packed_gemm[(triton.cdiv(n, tiles.block_n), num_tiles_m)](
        tiled(x, [tiles.block_m, block_k]),
        tiled(weight.words, [tiles.block_n, num_tiles * TILE_WORDS], 64),
        # The copy engine writes to multiples of 128 bytes.
        tiled(weight.scales.view(-1), [block_g]),
        None if weight.zeros is None else tiled(weight.zeros.view(-1), [2 * BLOCK_N]),
        out,
        None if experts is None else experts.tiles,
        None if experts is None else experts.num_tiles,
        num_tiles_m,
        m,
        n,
        num_weights,
        k,
        BITS=weight.bits,
        GROUP=weight.group_size if block_k % weight.group_size == 0 else tile_k,
        GROUP_SIZE=weight.group_size,
        STAGES=min(tiles.num_stages, triton.cdiv(k, block_k)),
        SHARED_ROW=experts is not None and experts.num_tiles is None and m == 1,
        KNOWN=experts is not None and experts.is_known,
        DEPENDENT=dependent,
        num_warps=4,
        **({} if tiles.registers is None else {"maxnreg": tiles.registers}),
        **dependent_launch.launch_options(dependent),
    )


@gluon.jit(do_not_specialize=["m", "max_tiles"])
def _hopper_packed_gemm(
    x,
    words,
    scales,
    zeros,
    p_out,
    p_tiles,
    p_num_tiles,
    max_tiles,
    m,
    n,
    num_weights,
    k,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED_ROW: gl.constexpr,
    KNOWN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    ROWS: gl.constexpr = x.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    BLOCK_N: gl.constexpr = words.block_shape[0]
    GROUPS: gl.constexpr = BLOCK_K // GROUP
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, BLOCK_K], x.layout)
    w_ring = gl.allocate_shared_memory(
        words.dtype, [STAGES, BLOCK_N, words.block_shape[1]], words.layout
    )
    s_ring = gl.allocate_shared_memory(
        scales.dtype, [STAGES * GROUPS, scales.block_shape[0]], scales.layout
    )
    if zeros is not None:
        z_ring = gl.allocate_shared_memory(
            zeros.dtype, [STAGES * GROUPS, zeros.block_shape[0]], zeros.layout
        )
    else:
        z_ring = s_ring
    ready, free = make_barriers(STAGES, READY=2, FREE=2 if BLOCK_N == 128 else 1)
    o_n = gl.program_id(0) * BLOCK_N
    first_n = o_n
    o_m = gl.program_id(1) * ROWS
    if p_tiles is not None:
        if not KNOWN:
            # The list of tiles is of a kernel that may still run.
            wait_for_inputs(DEPENDENT)
        expert, o_m, m, k = tile_of_expert(p_tiles, p_num_tiles, max_tiles, k)
        first_n += expert * n
    release_dependents(DEPENDENT)
    rings = (x_ring, w_ring, s_ring, z_ring, ready, free)
    HAS_ZEROS: gl.constexpr = zeros is not None
    FLOAT4: gl.constexpr = scales.dtype == gl.uint8
    shape: gl.constexpr = (
        ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP, GROUPS, BITS, HAS_ZEROS, p_tiles is not None, FLOAT4
    )  # fmt: skip
    of_weights = (x, words, scales, zeros, rings, first_n, num_weights, k, GROUP_SIZE, shape)
    of_rows = (x, x_ring, ready, free, 0 if SHARED_ROW else o_m, k, STAGES, DEPENDENT)
    if BLOCK_N == 128:
        gl.warp_specialize(
            [
                (_multiply, (rings, p_out, o_m, o_n, m, n, k, 0, shape)),
                (_multiply, (rings, p_out, o_m, o_n, m, n, k, 1, shape)),
                (_copy_weights, of_weights),
                (copy_rows, of_rows),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (rings, p_out, o_m, o_n, m, n, k, 0, shape)),
                (_copy_weights, of_weights),
                (copy_rows, of_rows),
            ],
            [1, 1],
            [40, 40],
        )


@gluon.jit
def tile_of_expert(p_tiles, p_num_tiles, max_tiles, k):
    """Expert, first row, the row behind the last one, and number of inputs of a program's tile; a
    tile without rows has no inputs."""
    i_tile = gl.program_id(1)
    if p_num_tiles is None:
        expert = gl.load(p_tiles + i_tile)
        is_tile = expert >= 0
        first = i_tile
        last = first + is_tile.to(gl.int32)
        own_k = gl.where(is_tile, k, 0)
        expert = gl.maximum(expert, 0)
    else:
        is_tile = i_tile < gl.load(p_num_tiles)
        expert = gl.load(p_tiles + i_tile, mask=is_tile, other=0)
        first = gl.load(p_tiles + max_tiles + i_tile, mask=is_tile, other=0)
        last = first + gl.load(p_tiles + 2 * max_tiles + i_tile, mask=is_tile, other=0)
        own_k = gl.where(is_tile, k, 0)
    return expert, first, last, own_k


@gluon.jit
def _copy_weights(
    x, words, scales, zeros, rings, o_n, n, k, GROUP_SIZE: gl.constexpr, shape: gl.constexpr
):
    """Fills the rings of weights, also before the previous kernel has ended. The rows of a stage
    arrive on the same barrier, maybe before this warp says how many bytes to expect."""
    _, w_ring, s_ring, z_ring, ready, free = rings
    BLOCK_K: gl.constexpr = shape[2]
    STAGES: gl.constexpr = shape[3]
    GROUP: gl.constexpr = shape[4]
    GROUPS: gl.constexpr = shape[5]
    OF_GROUP: gl.constexpr = scales.block_type.nbytes + (zeros.block_type.nbytes if shape[7] else 0)
    for i in range(gl.cdiv(k, BLOCK_K)):
        slot = i % STAGES
        o_k = i * BLOCK_K
        is_ready = ready.index(slot)
        hopper.mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(is_ready, words.block_type.nbytes + GROUPS * OF_GROUP)
        hopper.tma.async_copy_global_to_shared(
            words, [o_n, o_k * shape[6] // 32], is_ready, w_ring.index(slot)
        )
        for g in gl.static_range(GROUPS):
            o_group = (o_k + g * GROUP) // GROUP_SIZE * n + o_n
            hopper.tma.async_copy_global_to_shared(
                scales, [o_group], is_ready, s_ring.index(slot * GROUPS + g)
            )
            if shape[7]:
                hopper.tma.async_copy_global_to_shared(
                    zeros, [o_group], is_ready, z_ring.index(slot * GROUPS + g)
                )


@gluon.jit
def copy_rows(x, x_ring, ready, free, o_m, k, STAGES: gl.constexpr, DEPENDENT: gl.constexpr):
    """Fills the ring of rows when the previous kernel has ended. The other warps read nothing of
    that kernel's output, so they need not wait for it."""
    BLOCK_K: gl.constexpr = x.block_shape[1]
    wait_for_inputs(DEPENDENT)
    for i in range(gl.cdiv(k, BLOCK_K)):
        slot = i % STAGES
        is_ready = ready.index(slot)
        hopper.mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(is_ready, x.block_type.nbytes)
        hopper.tma.async_copy_global_to_shared(x, [o_m, i * BLOCK_K], is_ready, x_ring.index(slot))


@gluon.jit
def multiply_stages(
    x_ring, ready, free, source, num_stages, TILES: gl.constexpr, TEAM: gl.constexpr,
    shape: gl.constexpr, LOAD, UNPACK, mma: gl.constexpr,
):  # fmt: skip
    """Products [64, ROWS] of weights and all rows of a ring: `LOAD` loads one of the TILES of a
    stage out of `source`, and `UNPACK` makes 64 inputs of it numbers."""
    STAGES: gl.constexpr = x_ring.shape[0]
    TILE_K: gl.constexpr = x_ring.shape[2] // TILES
    b_acc = gl.full([64, x_ring.shape[1]], 0.0, gl.float32, mma)
    hopper.mbarrier.wait(ready.index(0), 0)
    tile = LOAD(source, 0, 0, TEAM, shape)
    for i in range(num_stages):
        slot = i % STAGES
        b_rows = x_ring.index(slot)
        for t in gl.static_range(TILES):
            now = tile
            if t + 1 < TILES:
                tile = LOAD(source, slot, t + 1, TEAM, shape)
            for part in gl.static_range(TILE_K // 64):
                b_weight = gl.convert_layout(
                    UNPACK(now, part, shape), gl.DotOperandLayout(0, mma, 2)
                )
                b_x = b_rows.slice(t * TILE_K + 64 * part, 64, dim=1).permute((1, 0))
                b_acc = hopper.warpgroup_mma(b_weight, b_x, b_acc, is_async=True)
                b_acc = hopper.warpgroup_mma_wait(1, deps=[b_acc])
        # NOTE: products of one stage must end before weights of the next are unpacked: the
        # assembler would otherwise end each product before the next one.
        after = gl.minimum(i + 1, num_stages - 1)
        hopper.mbarrier.wait(ready.index(after % STAGES), after // STAGES & 1)
        tile = LOAD(source, after % STAGES, 0, TEAM, shape)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
        if i + STAGES < num_stages:
            # The copy engine writes through another proxy than loads read.
            hopper.fence_async_shared()
            hopper.mbarrier.arrive(free.index(slot), count=1)
    return b_acc


@gluon.jit
def _multiply(rings, p_out, o_m, o_n, m, n, k, TEAM: gl.constexpr, shape: gl.constexpr):
    """Multiplies the weights of a team's outputs by all rows of the program, if it has any."""
    if shape[8]:
        if k > 0:
            _multiply_rows(rings, p_out, o_m, o_n, m, n, k, TEAM, shape)
    else:
        _multiply_rows(rings, p_out, o_m, o_n, m, n, k, TEAM, shape)


@gluon.jit
def _multiply_rows(rings, p_out, o_m, o_n, m, n, k, TEAM: gl.constexpr, shape: gl.constexpr):
    x_ring, w_ring, s_ring, z_ring, ready, free = rings
    ROWS: gl.constexpr = shape[0]
    BLOCK_N: gl.constexpr = shape[1]
    TILES: gl.constexpr = shape[2] * shape[6] // 512
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    source = (w_ring, s_ring, z_ring)
    b_acc = multiply_stages(
        x_ring, ready, free, source, gl.cdiv(k, shape[2]), TILES, TEAM, shape, _load_tile, _unpack,
        mma
    )  # fmt: skip
    if shape[6] == 4 and not shape[9]:
        b_acc *= INT4_DIVISOR
    o_row = o_m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, mma))
    o_row_of_unit = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    if BLOCK_N == 32:
        o_out = o_n + (o_row_of_unit >> 4 << 3 | o_row_of_unit & 7)
        is_output = o_row_of_unit & 8 == 0
    else:
        o_out = o_n + 64 * TEAM + o_row_of_unit
        is_output = o_row_of_unit >= 0
    is_inside = (o_row < m)[None, :] & (is_output & (o_out < n))[:, None]
    gl.store(
        p_out + o_row.to(gl.int64)[None, :] * n + o_out[:, None],
        b_acc.to(gl.bfloat16),
        mask=is_inside,
    )


@gluon.jit
def _unpack(tile, PART: gl.constexpr, shape: gl.constexpr):
    """Weights [64, 64] of a part of a tile as `_load_tile` returns it: of four bits, a tile has
    two."""
    HALF: gl.constexpr = shape[1] == 32
    if shape[9]:
        b_left = unpack_float4(tile[2 * PART], tile[4 + 2 * PART], HALF)
        b_right = unpack_float4(tile[2 * PART + 1], tile[4 + 2 * PART + 1], HALF)
    elif shape[6] == 4:
        b_left = unpack_int4(tile[2 * PART], tile[4 + 2 * PART], shape[7], HALF)
        b_right = unpack_int4(tile[2 * PART + 1], tile[4 + 2 * PART + 1], shape[7], HALF)
    elif shape[7]:
        b_left = beside(unpack_int8(tile[0], tile[4], HALF), unpack_int8(tile[1], tile[5], HALF))
        b_right = beside(unpack_int8(tile[2], tile[6], HALF), unpack_int8(tile[3], tile[7], HALF))
    else:
        b_left = beside(unpack_fp8(tile[0], tile[4], HALF), unpack_fp8(tile[1], tile[5], HALF))
        b_right = beside(unpack_fp8(tile[2], tile[6], HALF), unpack_fp8(tile[3], tile[7], HALF))
    return beside(b_left, b_right)


@gluon.jit
def _load_tile(source, slot, TILE: gl.constexpr, TEAM: gl.constexpr, shape: gl.constexpr):
    """Words of a team's outputs of the four blocks of a tile of a stage, then (scales, zero points)
    of each block."""
    w_ring, s_ring, z_ring = source
    GROUP: gl.constexpr = shape[4]
    TILE_K: gl.constexpr = 512 // shape[6]
    PARTS: gl.constexpr = TILE_K // GROUP if GROUP < TILE_K else 1
    OUTPUTS: gl.constexpr = 32 if shape[1] == 32 else 64
    words = w_ring.index(slot).slice(TEAM * OUTPUTS, OUTPUTS, dim=0).slice(TILE * 16, 16, dim=1)
    b_words = words.load(word_layout(OUTPUTS))
    b_0, b_1, b_2, b_3 = split_blocks(twice(b_words) if OUTPUTS == 32 else b_words)
    first = slot * shape[5] + TILE * TILE_K // GROUP
    group_0 = _load_group(s_ring, z_ring, first, b_0, TEAM, OUTPUTS)
    group_1 = _load_group(s_ring, z_ring, first + 1, b_0, TEAM, OUTPUTS) if PARTS == 4 else group_0
    group_2 = (
        _load_group(s_ring, z_ring, first + PARTS // 2, b_0, TEAM, OUTPUTS)
        if PARTS > 1
        else group_0
    )
    group_3 = _load_group(s_ring, z_ring, first + 3, b_0, TEAM, OUTPUTS) if PARTS == 4 else group_2
    return b_0, b_1, b_2, b_3, group_0, group_1, group_2, group_3


@gluon.jit
def _load_group(s_ring, z_ring, i, b_words, TEAM: gl.constexpr, OUTPUTS: gl.constexpr):
    """Scales and zero points of a group, [64, 1] each; without the latter, other numbers stand for
    them."""
    b_scale = _of_outputs(s_ring.index(i).slice(TEAM * OUTPUTS, OUTPUTS), b_words)
    return b_scale, _of_outputs(z_ring.index(i).slice(TEAM * OUTPUTS, OUTPUTS), b_words)


@gluon.jit
def _of_outputs(values, b_words):
    """A number for each output, [64, 1], in the threads that have its words."""
    layout: gl.constexpr = gl.SliceLayout(1, b_words.type.layout)
    if values.shape[0] == 64:
        b_values = values.load(layout)
    else:
        b_half = values.load(gl.SliceLayout(1, word_layout(32)))[:, None]
        b_values = gl.convert_layout(gl.reshape(twice(b_half), (64,)), layout)
    return b_values[:, None]
