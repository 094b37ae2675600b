"""Products of 8 bits by 8 bits for many rows on Hopper, e4m3 or integers, by warps with roles; see
`hopper_wide_gemm`.

The matrix unit adds e4m3 products with some 14 bits. So sums of 128 inputs are taken from it and
added in float32, one after another: how many rows or columns a tile has changes no bit. Sums of
integers are exact. Of weights in blocks, a sum of 128 inputs is multiplied by its own scales as it
is added.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..launch import dependent_launch
from ..launch.hopper_copies import release_dependents, tiled, wait_for_inputs
from . import hopper_wide_gemm, wide_tiles
from .hopper_wide_gemm import copy_tiles, make_rings, store_tile
from .wide_tiles import TeamTiles

place = gluon.jit(wide_tiles.place.fn)

BLOCK_K = 128
"""Number of inputs in a tile: a row of a tile is a line of shared memory, and a sum of the matrix
unit."""
BLOCK_OUTPUTS = gl.constexpr(64)
"""Outputs that share the scales of a weight in blocks."""


def w8a8_gemm(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
    tiles: TeamTiles,
    *,
    num_programs: int,
) -> None:
    """Writes the product of x [M, K] with scales float32 [M] and weight [N, K] with scales float32
    [N] to out [M, N], bfloat16; x and weight are float8_e4m3fn or int8. Scales of blocks, of
    float8_e4m3fn, are [K / 128, M] and [ceil(N / 64), K / 128]; columns of tiles divide by 64
    then."""
    (m, k), n = x.shape, weight.shape[0]
    rows = tiles.team_rows
    first_n = tiles.first_n
    rest_n = tiles.block_n - tiles.first_n
    _w8a8_gemm[(min(tiles.count(m, n), num_programs),)](
        tiled(x, [rows, BLOCK_K]),
        x_scales,
        tiled(weight, [first_n, BLOCK_K]),
        tiled(weight, [rest_n, BLOCK_K]) if rest_n else None,
        weight_scales,
        tiled(out, [rows, tiles.chunk]),
        tiled(out, [rows, rest_n]) if 0 < rest_n < tiles.chunk else None,
        m,
        n,
        k,
        IN_BLOCKS=weight_scales.ndim == 2,
        **constants(tiles),
        num_warps=4,
        **dependent_launch.launch_options(True),
    )


def constants(tiles: TeamTiles) -> dict[str, int]:
    """Constants that the kernel is compiled for, besides the blocks of its descriptors."""
    return hopper_wide_gemm.constants(tiles) | {"BLOCK_K": BLOCK_K}


@gluon.jit(do_not_specialize=["m"])
def _w8a8_gemm(
    x,
    p_x_scales,
    weight,
    weight_rest,
    p_weight_scales,
    out,
    out_rest,
    m,
    n,
    k,
    IN_BLOCKS: gl.constexpr,
    TEAMS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    ROWS: gl.constexpr = x.block_shape[0]
    BLOCK_N: gl.constexpr = weight.block_shape[0]
    REST_N: gl.constexpr = 0 if weight_rest is None else weight_rest.block_shape[0]
    rings, staged, staged_rest = make_rings(x, weight, weight_rest, out, out_rest, TEAMS, STAGES)
    release_dependents(True)
    size = (m, n, k)
    shape: gl.constexpr = (TEAMS, ROWS, BLOCK_N, REST_N, BLOCK_K, STAGES, GROUP, IN_BLOCKS)
    stored = (out, out_rest, staged, staged_rest, p_x_scales, p_weight_scales)
    copied = (x, weight, weight_rest, rings, size, shape)
    if TEAMS == 2:
        gl.warp_specialize(
            [
                (_multiply, (rings, stored, size, 0, shape)),
                (_multiply, (rings, stored, size, 1, shape)),
                (copy_tiles, copied),
            ],
            [4, 1],
            [REGISTERS, 40],
        )
    else:
        gl.warp_specialize(
            [(_multiply, (rings, stored, size, 0, shape)), (copy_tiles, copied)], [1], [40]
        )


@gluon.jit
def _multiply(rings, stored, size, TEAM: gl.constexpr, shape: gl.constexpr):
    """Multiplies ROWS rows of every tile of this program."""
    x_ring, w_ring, rest_ring, ready, free = rings
    scales = stored[4:]
    m, n, k = size
    TEAMS: gl.constexpr = shape[0]
    ROWS: gl.constexpr = shape[1]
    BLOCK_N: gl.constexpr = shape[2]
    REST_N: gl.constexpr = shape[3]
    STAGES: gl.constexpr = shape[5]
    GROUP: gl.constexpr = shape[6]
    IN_BLOCKS: gl.constexpr = shape[7]
    SUM: gl.constexpr = gl.int32 if x_ring.dtype == gl.int8 else gl.float32
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    mma_rest: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, REST_N if REST_N else 16, 32]
    )
    num_tiles = gl.cdiv(m, TEAMS * ROWS) * gl.cdiv(n, BLOCK_N + REST_N)
    num_steps = gl.cdiv(k, shape[4])
    turn = 0
    which = 2 * TEAM
    # Scales of blocks are read beside the first tile, not after it.
    wait_for_inputs(IN_BLOCKS)
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        o_m, o_n = place(i_tile, m, n, TEAMS * ROWS, BLOCK_N + REST_N, GROUP)
        o_m += TEAM * ROWS
        b_acc = gl.full([ROWS, BLOCK_N], 0, SUM, mma)
        b_rest = gl.full([ROWS, REST_N if REST_N else 16], 0, SUM, mma_rest)
        blocks = (
            scales,
            num_steps,
            o_m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma)),
            m,
            o_n,
            n,
        )
        factors = None
        if IN_BLOCKS:
            factors = factors_of(blocks, 0)
        for i in range(num_steps):
            slot = turn % STAGES
            b_scale = None
            b_scale_rest = None
            if IN_BLOCKS:
                b_scale, b_scale_rest = scales_of(factors, b_acc, b_rest)
                # They arrive while the products of this step are made.
                factors = factors_of(blocks, i + 1)
            hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
            b_x = x_ring.index(TEAMS * slot + TEAM)
            tiles = (b_x, w_ring.index(slot), rest_ring.index(slot), free.index(slot))
            b_acc, b_rest = add_tile(tiles, b_acc, b_rest, b_scale, b_scale_rest, REST_N)
            turn += 1
        which = _store(b_acc, b_rest, stored, which, o_m, o_n, m, n, TEAM, REST_N, IN_BLOCKS)
    hopper.tma.store_wait(0)


@gluon.jit
def _store(
    b_acc, b_rest, stored, which, o_m, o_n, m, n, TEAM: gl.constexpr, REST_N: gl.constexpr,
    IN_BLOCKS: gl.constexpr
):  # fmt: skip
    """Stores both parts of a team's rows. Returns the place of the next chunk."""
    out, out_rest, staged, staged_rest, p_x_scales, p_weight_scales = stored
    b_out = b_acc if IN_BLOCKS else scaled(b_acc, p_x_scales, p_weight_scales, o_m, o_n, m, n)
    which = store_tile(b_out, out, staged, which, o_m, o_n)
    if REST_N:
        o_n += b_acc.shape[1]
        b_out_rest = (
            b_rest if IN_BLOCKS else scaled(b_rest, p_x_scales, p_weight_scales, o_m, o_n, m, n)
        )
        if out_rest is None:
            which = store_tile(b_out_rest, out, staged, which, o_m, o_n)
        else:
            # The single buffer has been read: other chunks have been copied since.
            store_tile(b_out_rest, out_rest, staged_rest, TEAM, o_m, o_n)
    return which


@gluon.jit
def add_tile(tiles, b_acc, b_rest, b_scale, b_scale_rest, REST_N: gl.constexpr):
    """Adds the products of a tile to both parts of the sums, and frees the tile."""
    b_x, b_w, b_w_rest, is_free = tiles
    b_w = b_w.permute((1, 0))
    b_w_rest = b_w_rest.permute((1, 0))
    if b_acc.dtype == gl.int32:
        b_acc = hopper.warpgroup_mma(b_x, b_w, b_acc, is_async=True)
        if REST_N:
            b_rest = hopper.warpgroup_mma(b_x, b_w_rest, b_rest, is_async=True)
            b_acc, b_rest = hopper.warpgroup_mma_wait(0, deps=[b_acc, b_rest])
        else:
            b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
        hopper.mbarrier.arrive(is_free, count=1)
    else:
        b_part = gl.full(b_acc.shape, 0.0, gl.float32, b_acc.type.layout)
        b_part = hopper.warpgroup_mma(b_x, b_w, b_part, use_acc=False, is_async=True)
        if REST_N:
            b_rest_part = gl.full(b_rest.shape, 0.0, gl.float32, b_rest.type.layout)
            b_rest_part = hopper.warpgroup_mma(
                b_x, b_w_rest, b_rest_part, use_acc=False, is_async=True
            )
            b_part, b_rest_part = hopper.warpgroup_mma_wait(1, deps=[b_part, b_rest_part])
            b_acc = plus(b_acc, b_part, b_scale)
            b_rest_part = hopper.warpgroup_mma_wait(0, deps=[b_rest_part])
            hopper.mbarrier.arrive(is_free, count=1)
            b_rest = plus(b_rest, b_rest_part, b_scale_rest)
        else:
            b_part = hopper.warpgroup_mma_wait(0, deps=[b_part])
            hopper.mbarrier.arrive(is_free, count=1)
            b_acc = plus(b_acc, b_part, b_scale)
    return b_acc, b_rest


@gluon.jit
def plus(b_acc, b_part, b_scale):
    """Sum of an accumulator and a part times the scale of its block, if it has one: rounded once,
    in every kernel."""
    if b_scale is None:
        b_acc += b_part
    else:
        b_acc = gl.fma(b_part, b_scale, b_acc)
    return b_acc


@gluon.jit
def factors_of(blocks, i):
    """The scales of rows [ROWS] and of three blocks of columns for the inputs of step i; zeros
    where there are none."""
    scales, num_groups, o_row, m, o_n, n = blocks
    p_x_scales, p_weight_scales = scales
    i_block = o_n // BLOCK_OUTPUTS
    num_blocks = gl.where(i < num_groups, gl.cdiv(n, BLOCK_OUTPUTS), 0)
    is_there = (o_row < m) & (i < num_groups)
    b_rows = gl.load(p_x_scales + gl.cast(i, gl.int64) * m + o_row, mask=is_there, other=0.0)
    p_block = p_weight_scales + i_block.to(gl.int64) * num_groups + i
    first = gl.load(p_block, mask=i_block < num_blocks, other=0.0)
    second = gl.load(p_block + num_groups, mask=i_block + 1 < num_blocks, other=0.0)
    third = gl.load(p_block + 2 * num_groups, mask=i_block + 2 < num_blocks, other=0.0)
    return b_rows, first, second, third


@gluon.jit
def scales_of(factors, b_acc, b_rest):
    """The scales of both parts of a tile, [rows, columns]."""
    b_rows, first, second, third = factors
    b_rows_rest = gl.convert_layout(b_rows, gl.SliceLayout(1, b_rest.type.layout))
    return _scale_of(b_rows, first, second, b_acc), _scale_of(b_rows_rest, third, third, b_rest)


@gluon.jit
def _scale_of(b_rows, first, second, b_like):
    """Scales of a part that lies in one block of columns or in two, of which threads keep one
    number each."""
    b_scale = gl.expand_dims(b_rows * first, 1)
    if b_like.shape[1] > BLOCK_OUTPUTS:
        gl.static_assert(b_like.shape[1] == 2 * BLOCK_OUTPUTS)
        o_column = gl.arange(0, b_like.shape[1], layout=gl.SliceLayout(0, b_like.type.layout))
        is_first = gl.expand_dims(o_column < BLOCK_OUTPUTS, 0)
        b_scale = gl.where(is_first, b_scale, gl.expand_dims(b_rows * second, 1))
    return gl.broadcast(b_scale, b_like)[0]


@gluon.jit
def scaled(b_sum, p_x_scales, p_weight_scales, o_m, o_n, m, n):
    """Sums [rows, columns] times the scales of their rows, then of their columns, in float32."""
    layout: gl.constexpr = b_sum.type.layout
    o_row = o_m + gl.arange(0, b_sum.shape[0], layout=gl.SliceLayout(1, layout))
    o_column = o_n + gl.arange(0, b_sum.shape[1], layout=gl.SliceLayout(0, layout))
    b_x_scale = gl.load(p_x_scales + o_row, mask=o_row < m, other=0.0)
    b_weight_scale = gl.load(p_weight_scales + o_column, mask=o_column < n, other=0.0)
    return b_sum.to(gl.float32) * b_x_scale[:, None] * b_weight_scale[None, :]
