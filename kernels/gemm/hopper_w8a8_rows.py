"""Products of 8 bits by 8 bits for up to 64 rows on Hopper: the bits of `hopper_w8a8_gemm`.

Time goes in reading weights. The matrix unit takes them as the operand with the many rows; rings of
weights are filled before the kernel that makes the rows has ended. Rows may be those of experts,
whose weights follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..launch import dependent_launch
from ..launch.hopper_copies import make_barriers, release_dependents, tiled, wait_for_inputs
from .hopper_packed_gemm import tile_of_expert
from .hopper_w8a8_gemm import BLOCK_OUTPUTS, plus
from .packed_words import RowsOfExperts

ask_early = gluon.jit(dependent_launch.ask_early.fn)

BLOCK_N = 64
"""Outputs of a program: the rows that the matrix unit takes from four warps."""
SUM_K = 128
"""Number of inputs whose sum is taken from the matrix unit."""


@dataclass(frozen=True, slots=True)
class RowsTiles:
    block_m: int
    """Number of rows of x in a tile, a multiple of 8."""
    block_k: int
    """A multiple of 256."""
    num_stages: int


# Keys are largest numbers of rows.
TILES = {
    8: RowsTiles(8, 512, 5),
    16: RowsTiles(16, 512, 5),
    32: RowsTiles(32, 512, 4),
    64: RowsTiles(64, 256, 6),
}


CROWDED_TILES = {
    8: RowsTiles(8, 256, 5),
    16: RowsTiles(16, 256, 5),
    64: RowsTiles(64, 256, 3),
}
"""Tiles where there are more programs than multiprocessors: two share one. Measured on an H200
(2026-11-23): 24,576 outputs and 4,096 inputs take 28.5 instead of 31.0 µs for one row, 33.3 instead
of 35.0 for 64."""
REGISTERS = 128
REGISTERS_IN_BLOCKS = 168
"""Number of registers of a thread. With the fewer ones two programs share a multiprocessor."""
SPILLING_ROWS = 64
"""Rows of a tile for which the fewer registers do not hold sums of blocks."""
ONE_ROUND = 132 * BLOCK_N
"""Number of outputs for which each multiprocessor of an H200 has one program."""


def choose(num_rows: int, num_outputs: int) -> RowsTiles | None:
    """Tiles for a product; None: it has too many rows."""
    most = next((most for most in TILES if num_rows <= most), None)
    return None if most is None else _tiles(most, num_outputs)


def tiles_for(num_outputs: int) -> list[RowsTiles]:
    """The tiles of all numbers of rows."""
    return [_tiles(most, num_outputs) for most in TILES]


def _tiles(most_rows: int, num_outputs: int) -> RowsTiles:
    is_crowded = num_outputs > ONE_ROUND and most_rows in CROWDED_TILES
    return (CROWDED_TILES if is_crowded else TILES)[most_rows]


def registers_of(tiles: RowsTiles, *, in_blocks: bool, of_experts: bool) -> int:
    """Registers of a thread. Of few rows of experts, programs are many: with the fewer registers
    the products of a token's 8 of 128 experts of 768 and 2,048 take 15.4 us in place of 19.9 on an
    H200 (2026-11-30)."""
    is_wide = in_blocks and not (of_experts and tiles.block_m < SPILLING_ROWS)
    return REGISTERS_IN_BLOCKS if is_wide else REGISTERS


def w8a8_rows(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
    tiles: RowsTiles,
    experts: RowsOfExperts | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N]; scales and dtypes as in
    `w8a8_gemm`. With experts, whose tiles have at most `block_m` rows, the weight is theirs,
    [E N, K], and so are its scales."""
    (m, k), n = x.shape, out.shape[1]
    assert len(weight) == n * (1 if experts is None else experts.num_experts)
    assert out.is_contiguous()
    num_tiles = triton.cdiv(m, tiles.block_m) if experts is None else experts.most_tiles
    _w8a8_rows[(triton.cdiv(n, BLOCK_N), num_tiles)](
        tiled(x, [tiles.block_m, tiles.block_k]),
        x_scales,
        tiled(weight, [BLOCK_N, tiles.block_k]),
        weight_scales,
        out,
        None if experts is None else experts.tiles,
        None if experts is None else experts.num_tiles,
        num_tiles,
        m,
        n,
        k,
        IN_BLOCKS=weight_scales.ndim == 2,
        SUM_K=SUM_K,
        STAGES=tiles.num_stages,
        SHARED_ROW=experts is not None and experts.num_tiles is None and m == 1,
        KNOWN=experts is not None and experts.is_known,
        DEPENDENT=dependent,
        num_warps=4,
        maxnreg=registers_of(
            tiles, in_blocks=weight_scales.ndim == 2, of_experts=experts is not None
        ),
        **dependent_launch.launch_options(dependent),
    )


@gluon.jit(do_not_specialize=["m", "max_tiles"])
def _w8a8_rows(
    x,
    p_x_scales,
    weight,
    p_weight_scales,
    p_out,
    p_tiles,
    p_num_tiles,
    max_tiles,
    m,
    n,
    k,
    IN_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED_ROW: gl.constexpr,
    KNOWN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    ROWS: gl.constexpr = x.block_shape[0]
    BLOCK_N: gl.constexpr = weight.block_shape[0]
    BLOCK_K: gl.constexpr = weight.block_shape[1]
    o_n = gl.program_id(0) * BLOCK_N
    o_m = gl.program_id(1) * ROWS
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, BLOCK_K], x.layout)
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    ready, free = make_barriers(STAGES, READY=2, FREE=1)
    first_n = o_n
    num_rows = m
    num_groups = gl.cdiv(k, SUM_K)
    if p_tiles is not None:
        if not KNOWN:
            # The list of tiles is of a kernel that may still run.
            wait_for_inputs(DEPENDENT)
        expert, o_m, m, k = tile_of_expert(p_tiles, p_num_tiles, max_tiles, k)
        first_n += expert * n
        if IN_BLOCKS:
            p_weight_scales += expert.to(gl.int64) * (n // BLOCK_OUTPUTS) * num_groups
        else:
            p_weight_scales += expert * n
    release_dependents(DEPENDENT)
    # Experts that share a row read the first one.
    from_m = 0 if SHARED_ROW else o_m
    rings = (x_ring, w_ring, ready, free)
    scales = (p_x_scales, p_weight_scales)
    size = (m, n, k, num_rows, o_m - from_m)
    shape: gl.constexpr = (ROWS, BLOCK_N, BLOCK_K, STAGES, SUM_K)
    gl.warp_specialize(
        [
            (_multiply, (rings, scales, p_out, o_m, o_n, size, DEPENDENT, IN_BLOCKS, shape)),
            (_copy, (weight, w_ring, ready, free, first_n, k, shape)),
            (_copy_rows, (x, x_ring, ready, free, from_m, k, DEPENDENT, shape)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _copy_rows(x, x_ring, ready, free, o_m, k, DEPENDENT: gl.constexpr, shape: gl.constexpr):
    """Fills the ring of rows when the previous kernel has ended. The other warps read that kernel's
    output only through this ring, so they need not wait."""
    wait_for_inputs(DEPENDENT)
    _copy(x, x_ring, ready, free, o_m, k, shape)


@gluon.jit
def _copy(tiles, ring, ready, free, o_first, k, shape: gl.constexpr):
    """Fills a ring; that of weights also before the previous kernel has ended."""
    BLOCK_K: gl.constexpr = shape[2]
    STAGES: gl.constexpr = shape[3]
    for i in range(gl.cdiv(k, BLOCK_K)):
        slot = i % STAGES
        is_ready = ready.index(slot)
        hopper.mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(is_ready, tiles.block_type.nbytes)
        hopper.tma.async_copy_global_to_shared(
            tiles, [o_first, i * BLOCK_K], is_ready, ring.index(slot)
        )


@gluon.jit
def _multiply(
    rings, scales, p_out, o_m, o_n, size, DEPENDENT: gl.constexpr, IN_BLOCKS: gl.constexpr,
    shape: gl.constexpr
):  # fmt: skip
    x_ring, w_ring, ready, free = rings
    p_x_scales, p_weight_scales = scales
    m, n, k, num_rows, o_before = size
    ROWS: gl.constexpr = shape[0]
    BLOCK_N: gl.constexpr = shape[1]
    BLOCK_K: gl.constexpr = shape[2]
    STAGES: gl.constexpr = shape[3]
    SUM_K: gl.constexpr = shape[4]
    INTEGERS: gl.constexpr = x_ring.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if INTEGERS else gl.float32
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    o_row = o_m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, mma))
    b_acc = gl.full([BLOCK_N, ROWS], 0, SUM, mma)
    num_groups = gl.cdiv(k, SUM_K)
    blocks = (
        p_x_scales - o_before,
        p_weight_scales + (o_n // BLOCK_OUTPUTS).to(gl.int64) * num_groups,
        num_groups,
        o_row,
        m,
        num_rows,
    )
    factors = (None, None)
    if IN_BLOCKS:
        factors = _first_factors(blocks, DEPENDENT)
    for i in range(gl.cdiv(k, BLOCK_K)):
        slot = i % STAGES
        hopper.mbarrier.wait(ready.index(slot), i // STAGES & 1)
        tiles = (x_ring.index(slot), w_ring.index(slot))
        if IN_BLOCKS:
            b_acc, factors = _add_blocks(
                tiles, b_acc, factors, blocks, i * (BLOCK_K // SUM_K), SUM_K
            )
        else:
            for part in gl.static_range(BLOCK_K // SUM_K):
                b_acc = _add(tiles, part, b_acc, None, SUM_K)
        if INTEGERS:
            b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
        hopper.mbarrier.arrive(free.index(slot), count=1)
    o_out = o_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma))
    scales = (p_x_scales - o_before, p_weight_scales)
    _store(b_acc, scales, p_out, o_row, o_out, m, n, IN_BLOCKS)


@gluon.jit
def _add_blocks(tiles, b_acc, factors, blocks, i_group, SUM_K: gl.constexpr):
    """Adds the products of tiles whose first inputs are group i_group, with the factors of this
    group and the next. Returns the sums, and the factors of the two groups that follow."""
    for pair in gl.static_range(tiles[0].shape[1] // (2 * SUM_K)):
        b_first = _scale_of(factors[0], b_acc)
        b_second = _scale_of(factors[1], b_acc)
        # Loaded while these two parts are multiplied.
        factors = _two_factors(blocks, i_group + 2 * pair + 2)
        b_acc = _add(tiles, 2 * pair, b_acc, b_first, SUM_K)
        b_acc = _add(tiles, 2 * pair + 1, b_acc, b_second, SUM_K)
    return b_acc, factors


@gluon.jit
def _add(tiles, part: gl.constexpr, b_acc, b_scale, SUM_K: gl.constexpr):
    """Adds the products of a part of the inputs of a tile of rows and one of weights; b_scale:
    None, or its scales."""
    b_x = tiles[0].slice(part * SUM_K, SUM_K, dim=1).permute((1, 0))
    b_w = tiles[1].slice(part * SUM_K, SUM_K, dim=1)
    if b_w.dtype == gl.int8:
        b_acc = hopper.warpgroup_mma(b_w, b_x, b_acc, is_async=True)
    else:
        b_part = gl.full(b_acc.shape, 0, gl.float32, b_acc.type.layout)
        b_part = hopper.warpgroup_mma(b_w, b_x, b_part, use_acc=False, is_async=True)
        b_part = hopper.warpgroup_mma_wait(0, deps=[b_part])
        b_acc = plus(b_acc, b_part, b_scale)
    return b_acc


@gluon.jit
def _scale_of(factors, b_like):
    return gl.broadcast(gl.expand_dims(factors[0] * factors[1], 0), b_like)[0]


@gluon.jit
def _first_factors(blocks, DEPENDENT: gl.constexpr):
    """Like `_two_factors`. All scales of weights are asked for from memory while the kernel before
    works."""
    o_line = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [4], [0])) * 32
    ask_early(blocks[1] + gl.minimum(o_line, gl.maximum(blocks[2] - 1, 0)), True)
    wait_for_inputs(DEPENDENT)
    return _two_factors(blocks, 0)


@gluon.jit
def _two_factors(blocks, i_group):
    """Scales of two consecutive groups of inputs; zeros after the last group."""
    return _factors(blocks, i_group), _factors(blocks, i_group + 1)


@gluon.jit
def _factors(blocks, i_group):
    """The scales of rows of x and of this program's block of weights for a group of inputs."""
    p_x_scales, p_block, num_groups, o_row, m, num_rows = blocks
    is_there = i_group < num_groups
    p_rows = p_x_scales + gl.cast(i_group, gl.int64) * num_rows + o_row
    b_rows = gl.load(p_rows, mask=(o_row < m) & is_there, other=0.0)
    return b_rows, gl.load(p_block + i_group, mask=is_there, other=0.0)


@gluon.jit
def _store(b_acc, scales, p_out, o_row, o_out, m, n, IN_BLOCKS: gl.constexpr):
    p_x_scales, p_weight_scales = scales
    b_out = b_acc.to(gl.float32)
    if not IN_BLOCKS:
        b_x_scale = gl.load(p_x_scales + o_row, mask=o_row < m, other=0.0)
        b_weight_scale = gl.load(p_weight_scales + o_out, mask=o_out < n, other=0.0)
        b_out = b_out * b_x_scale[None, :] * b_weight_scale[:, None]
    is_inside = (o_row < m)[None, :] & (o_out < n)[:, None]
    o_place = o_row.to(gl.int64)[None, :] * n + o_out[:, None]
    gl.store(p_out + o_place, b_out.to(p_out.dtype.element_ty), mask=is_inside)
