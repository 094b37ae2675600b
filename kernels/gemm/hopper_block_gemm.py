"""x @ weight.T with weights in GGUF's block formats on Hopper: the bits of `gemm` over the expanded
matrix.

As `hopper_packed_gemm`: two warps fill rings by the copy engine, four make planes numbers in
registers and multiply. K is never split, and its order is that of `gemm`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..launch import dependent_launch
from ..launch.hopper_copies import make_barriers, release_dependents, tiled
from ..quant.block_formats import BlockFormat
from ..quant.block_planes import BlockPlanes
from ..quant.unpacked_blocks import DIVISOR, bit_layout, unpack_block, unpack_nibbles
from ..quant.unpacked_weights import (
    INT4_DIVISOR,
    beside,
    split_blocks,
    unpack_int4,
    unpack_int8,
    word_layout,
)
from .block_unpacking import constants
from .hopper_packed_gemm import copy_rows, multiply_stages, serves
from .packed_tiles import CROWDED_TILES, LONE_TEAM, MOST_ROWS_OF_ONE, ONE_ROUND, TILES, RingTiles

BLOCK_N = 64
"""Outputs of a program: those of a block of planes."""
TILE_WORDS = 16
"""Words of an output in a tile."""
SHARED_BYTES = 222 << 10
"""Shared memory of a multiprocessor that rings may take."""
CHUNK = 256
"""Most elements that the copy engine takes at once from a plane of one dimension."""


def choose(num_rows: int, weight: BlockPlanes) -> RingTiles | None:
    """The tiles for a product; None: a matrix that is expanded first takes less time."""
    bits = 8 if weight.format.bits == 8 else 4
    most = next((rows for each, rows in TILES if each == bits and num_rows <= rows), None)
    if most is None:
        return LONE_TEAM[bits] if num_rows <= MOST_ROWS_OF_ONE else None
    is_crowded = weight.shape[0] > ONE_ROUND and (bits, most) in CROWDED_TILES
    return CROWDED_TILES[bits, most] if is_crowded else TILES[bits, most]


def fits(weight: BlockPlanes) -> bool:
    """Whether the rows of a weight are whole in tiles of the kernel."""
    return weight.shape[1] % tile_inputs(weight.format.bits) == 0


def tile_inputs(bits: int) -> int:
    return 64 if bits == 8 else 128


def hopper_block_gemm(
    x: torch.Tensor,
    weight: BlockPlanes,
    out: torch.Tensor,
    tiles: RingTiles,
    *,
    dependent: bool = False,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N], whose rows may be parts of
    longer ones."""
    m, (n, k), format = x.shape[0], weight.shape, weight.format
    assert serves(x)
    assert fits(weight)
    assert out.stride(1) == 1
    tile_k = tile_inputs(format.bits)
    num_tiles = next(each for each in (tiles.num_tiles, 4, 2, 1) if k % (each * tile_k) == 0)
    block_k = num_tiles * tile_k
    _hopper_block_gemm[(triton.cdiv(n, BLOCK_N), triton.cdiv(m, tiles.block_m))](
        tiled(x, [tiles.block_m, block_k]),
        tiled(weight.words, [BLOCK_N, num_tiles * TILE_WORDS], 64),
        None if weight.high is None else tiled(weight.high.view(-1), [CHUNK]),
        tiled(weight.scales.view(-1), [scale_chunk(format)]),
        None if weight.factors is None else tiled(weight.factors.view(-1), [CHUNK]),
        out,
        m,
        n,
        k,
        out.stride(0),
        **constants(format),
        STAGES=num_stages(tiles, weight, block_k),
        DEPENDENT=dependent,
        num_warps=4,
        maxnreg=tiles.registers,
        **dependent_launch.launch_options(dependent),
    )


def scale_chunk(format: BlockFormat) -> int:
    """Scales, and minima, that the copy engine takes at once: those of a unit of 256 inputs, or of
    a tile."""
    of_unit = (2 if format.has_min else 1) * BLOCK_N
    return (
        of_unit
        if format.is_nested
        else min(CHUNK, tile_inputs(format.bits) // format.unit * of_unit)
    )


def num_stages(tiles: RingTiles, weight: BlockPlanes, block_k: int) -> int:
    """Number of stages of `block_k` inputs that fit into shared memory."""
    format = weight.format
    scales = 2 * max(scale_chunk(format), weight.scales.shape[2] * BLOCK_N * block_k // format.unit)
    # Of 64 outputs: words or bytes, bits above four, and two factors for 32 inputs.
    planes = (
        BLOCK_N * block_k * format.bits // 8 + scales + (4 * block_k if format.is_nested else 0)
    )
    return min(
        tiles.num_stages,
        SHARED_BYTES // (2 * tiles.block_m * block_k + planes),
        weight.shape[1] // block_k,
    )


@gluon.jit(do_not_specialize=["m"])
def _hopper_block_gemm(
    x,
    words,
    high,
    scales,
    factors,
    p_out,
    m,
    n,
    k,
    stride_out,
    BITS: gl.constexpr,
    OFFSET: gl.constexpr,
    UNIT: gl.constexpr,
    MIN_SIGN: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    ROWS: gl.constexpr = x.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    TILES: gl.constexpr = words.block_shape[1] // 16
    SCALES: gl.constexpr = _num_scale_chunks(BLOCK_K, UNIT, MIN_SIGN, scales.block_shape[0])
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, BLOCK_K], x.layout)
    w_ring = gl.allocate_shared_memory(
        words.dtype, [STAGES, 64, words.block_shape[1]], words.layout
    )
    s_ring = gl.allocate_shared_memory(
        scales.dtype, [STAGES * SCALES, scales.block_shape[0]], scales.layout
    )
    h_ring = s_ring
    f_ring = s_ring
    if high is not None:
        h_ring = gl.allocate_shared_memory(
            high.dtype, [STAGES * TILES * (BITS - 4), 256], high.layout
        )
    if factors is not None:
        f_ring = gl.allocate_shared_memory(factors.dtype, [STAGES * TILES * 2, 256], factors.layout)
    ready, free = make_barriers(STAGES, READY=2, FREE=1)
    release_dependents(DEPENDENT)
    rings = (x_ring, w_ring, h_ring, s_ring, f_ring, ready, free)
    shape: gl.constexpr = (ROWS, BLOCK_K, STAGES, TILES, SCALES, BITS, OFFSET, UNIT, MIN_SIGN)
    i_n = gl.program_id(0)
    o_m = gl.program_id(1) * ROWS
    gl.warp_specialize(
        [
            (_multiply, (rings, p_out, o_m, i_n, m, n, k, stride_out, shape)),
            (_copy_weights, (words, high, scales, factors, rings, i_n, n, k, shape)),
            (copy_rows, (x, x_ring, ready, free, o_m, k, STAGES, DEPENDENT)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.constexpr_function
def _num_scale_chunks(block_k, unit, min_sign, chunk):
    """Chunks of scales of a stage."""
    return max(1, block_k // unit * (2 if min_sign else 1) * 64 // chunk)


@gluon.jit
def _copy_weights(words, high, scales, factors, rings, i_n, n, k, shape: gl.constexpr):
    """Fills the rings of weights, also before the previous kernel has ended. The rows of a stage
    arrive on the same barrier, maybe before this warp says how many bytes to expect."""
    _, w_ring, h_ring, s_ring, f_ring, ready, free = rings
    BLOCK_K: gl.constexpr = shape[1]
    STAGES: gl.constexpr = shape[2]
    TILES: gl.constexpr = shape[3]
    SCALES: gl.constexpr = shape[4]
    PLANES: gl.constexpr = shape[5] - 4 if high is not None else 0
    UNIT: gl.constexpr = shape[7]
    OF_UNIT: gl.constexpr = 128 if shape[8] != 0 else 64
    SCALE_CHUNK: gl.constexpr = scales.block_shape[0]
    OF_SCALES: gl.constexpr = SCALES * scales.block_type.nbytes
    OF_FACTORS: gl.constexpr = TILES * 512 if factors is not None else 0
    for i in range(k // BLOCK_K):
        slot = i % STAGES
        o_k = i * BLOCK_K
        is_ready = ready.index(slot)
        hopper.mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(
            is_ready, words.block_type.nbytes + TILES * PLANES * 1024 + OF_SCALES + OF_FACTORS
        )
        o_words = o_k // BLOCK_K * (TILES * 16)
        hopper.tma.async_copy_global_to_shared(
            words, [i_n * 64, o_words], is_ready, w_ring.index(slot)
        )
        o_scale = (i_n * (k // UNIT) + o_k // UNIT) * OF_UNIT
        for s in gl.static_range(SCALES):
            to = s_ring.index(slot * SCALES + s)
            hopper.tma.async_copy_global_to_shared(
                scales, [o_scale + s * SCALE_CHUNK], is_ready, to
            )
        for t in gl.static_range(TILES):
            for p in gl.static_range(PLANES):
                o_high = ((p * ((n + 63) // 64) + i_n) * (k // 128) + o_k // 128 + t) * 256
                to = h_ring.index((slot * TILES + t) * PLANES + p)
                hopper.tma.async_copy_global_to_shared(high, [o_high], is_ready, to)
        if OF_FACTORS != 0:
            o_factor = (i_n * (k // 32) + o_k // 32) * 128
            for f in gl.static_range(2 * TILES):
                to = f_ring.index(slot * 2 * TILES + f)
                hopper.tma.async_copy_global_to_shared(factors, [o_factor + f * 256], is_ready, to)


@gluon.jit
def _multiply(rings, p_out, o_m, i_n, m, n, k, stride_out, shape: gl.constexpr):
    x_ring, _, _, _, _, ready, free = rings
    ROWS: gl.constexpr = shape[0]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    b_acc = multiply_stages(
        x_ring, ready, free, rings, k // shape[1], shape[3], 0, shape, _load_tile, _unpack, mma
    )
    if shape[5] == 4:
        b_acc *= INT4_DIVISOR if shape[8] == 0 else DIVISOR
    o_row = o_m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, mma))
    o_out = i_n * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    is_inside = (o_row < m)[None, :] & (o_out < n)[:, None]
    gl.store(
        p_out + o_row.to(gl.int64)[None, :] * stride_out + o_out[:, None],
        b_acc.to(gl.bfloat16),
        mask=is_inside,
    )


@gluon.jit
def _unpack(tile, PART: gl.constexpr, shape: gl.constexpr):
    """Weights [N, 64] of a part of a tile as `_load_tile` returns it: of eight bits, a tile has
    one, else two."""
    words, groups, _, _ = tile
    if shape[5] == 8:
        b_left = beside(_unpack_bytes(words[0], groups[0]), _unpack_bytes(words[1], groups[0]))
        b_right = beside(_unpack_bytes(words[2], groups[1]), _unpack_bytes(words[3], groups[1]))
    else:
        b_left = _unpack_block(tile, 2 * PART, shape)
        b_right = _unpack_block(tile, 2 * PART + 1, shape)
    return beside(b_left, b_right)


@gluon.jit
def _unpack_bytes(b_words, group):
    b_scale = group[0]
    return unpack_int8(b_words, (b_scale, gl.full_like(b_scale, 128.0)), False)


@gluon.jit
def _unpack_block(tile, BLOCK: gl.constexpr, shape: gl.constexpr):
    """Weights [N, 32] of a block of a tile. Those of four bits take fewer instructions, and are
    divided."""
    words, groups, b_high, b_upper = tile
    if shape[5] == 4 and shape[8] == 0:
        b_scale = groups[BLOCK][0]
        b_weight = unpack_int4(words[BLOCK], (b_scale, b_scale), False, False)
    elif shape[5] == 4:
        b_weight = unpack_nibbles(words[BLOCK], groups[BLOCK], shape[7] != 32, shape[8])
    else:
        b_weight = unpack_block(
            words[BLOCK],
            b_high,
            b_upper,
            groups[BLOCK],
            BLOCK,
            shape[5],
            shape[6],
            shape[7] != 32,
            shape[8],
        )
    return b_weight


@gluon.jit
def _load_tile(rings, slot, TILE: gl.constexpr, TEAM: gl.constexpr, shape: gl.constexpr):
    """Words of the four blocks of a tile of a stage, what `block_scales` reads of each group of 32
    inputs, and elements of the fifth and the sixth bits; of four bits and of eight, words in their
    place. There is one team."""
    _, w_ring, h_ring, _, _, _, _ = rings
    BITS: gl.constexpr = shape[5]
    b_0, b_1, b_2, b_3 = split_blocks(
        w_ring.index(slot).slice(TILE * 16, 16, dim=1).load(word_layout(64))
    )
    b_high = b_0
    b_upper = b_0
    PLANES: gl.constexpr = 0 if BITS == 8 else BITS - 4
    if PLANES > 0:
        first = (slot * shape[3] + TILE) * PLANES
        b_high = _load_bits(h_ring, first, b_0)
        if PLANES > 1:
            b_upper = _load_bits(h_ring, first + 1, b_0)
    group_0 = _load_group(rings, slot, TILE, 0, b_0, shape)
    group_1 = _load_group(rings, slot, TILE, 1, b_0, shape)
    group_2 = _load_group(rings, slot, TILE, 2, b_0, shape) if BITS != 8 else group_0
    group_3 = _load_group(rings, slot, TILE, 3, b_0, shape) if BITS != 8 else group_0
    return (b_0, b_1, b_2, b_3), (group_0, group_1, group_2, group_3), b_high, b_upper


@gluon.jit
def _load_bits(h_ring, i, b_words):
    b_bits = gl.reshape(h_ring.index(i).load(bit_layout()), (64, 4))
    return gl.convert_layout(b_bits, b_words.type.layout, assert_trivial=True)


@gluon.jit
def _load_group(rings, slot, TILE: gl.constexpr, GROUP: gl.constexpr, b_words, shape: gl.constexpr):
    """Scale, minimum and factors, [N, 1] each, of a group of 32 inputs; where a format has none,
    the scale instead."""
    _, _, _, s_ring, f_ring, _, _ = rings
    layout: gl.constexpr = gl.SliceLayout(1, b_words.type.layout)
    UNIT: gl.constexpr = shape[7]
    PLANES: gl.constexpr = 2 if shape[8] != 0 else 1
    CHUNK: gl.constexpr = s_ring.shape[1]
    TILE_K: gl.constexpr = shape[1] // shape[3]
    AT: gl.constexpr = (TILE * TILE_K + 32 * GROUP) // UNIT * PLANES * 64
    b_pair = s_ring.index(slot * shape[4] + AT // CHUNK)
    b_scale = b_pair.slice(AT % CHUNK, 64).load(layout)[:, None]
    b_minimum = b_scale
    if PLANES == 2:
        b_minimum = b_pair.slice(AT % CHUNK + 64, 64).load(layout)[:, None]
    b_factor = b_scale
    b_other = b_scale
    if UNIT != 32:
        b_pairs = f_ring.index((slot * shape[3] + TILE) * 2 + GROUP // 2)
        b_factor = b_pairs.slice(GROUP % 2 * 128, 64).load(layout)[:, None]
        b_other = b_pairs.slice(GROUP % 2 * 128 + 64, 64).load(layout)[:, None]
    return b_scale, b_minimum, b_factor, b_other
