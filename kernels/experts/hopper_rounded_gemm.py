"""Products of 8 bits by 8 bits of many rows with the weights of their experts on Hopper: the
arithmetic and the bits of `hopper_w8a8_gemm`, over the tiles of `hopper_grouped_gemm`."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..gemm.hopper_w8a8_gemm import (
    BLOCK_K,
    BLOCK_OUTPUTS,
    add_tile,
    factors_of,
    scaled,
    scales_of,
)
from ..gemm.hopper_wide_gemm import store_tile
from ..gemm.w8a8 import W8A8Weight
from ..launch import dependent_launch
from ..launch.hopper_copies import release_dependents, tiled, wait_for_inputs
from ..quant.token_rounding import RoundedTokens
from .hopper_grouped_gemm import (
    COPYING_REGISTERS,
    TEAM_REGISTERS,
    TEAM_ROWS,
    GroupedTiles,
    copy_tiles,
    make_rings,
    tile_of,
)
from .work_list import WorkList

TILES = GroupedTiles(2, 128, 6)


def rounded_gemm(
    x: RoundedTokens,
    weight: W8A8Weight,
    out: torch.Tensor,
    work: WorkList,
    tiles: GroupedTiles = TILES,
    *,
    num_programs: int,
) -> None:
    """Writes the product of sorted rows x [rows, K] and their experts' weights [E N, K] to sorted
    out [rows, N], bfloat16. Of weights in blocks, N divides by 64."""
    num_rows, k = x.values.shape
    n = out.shape[1]
    assert work.block_m == tiles.block_m
    _rounded_gemm[(num_programs,)](
        tiled(x.values, [TEAM_ROWS, BLOCK_K]),
        x.scales,
        tiled(weight.values, [tiles.block_n, BLOCK_K]),
        weight.scales,
        tiled(out, [TEAM_ROWS, tiles.chunk]),
        work.tiles,
        work.num_tiles,
        work.max_tiles,
        num_rows,
        n,
        k,
        IN_BLOCKS=weight.scales.ndim == 2,
        **constants(tiles),
        num_warps=4,
        **dependent_launch.launch_options(True),
    )


def constants(tiles: GroupedTiles) -> dict[str, int]:
    """Constants that the kernel is compiled for, besides the blocks of its descriptors."""
    return {
        "TEAMS": tiles.num_teams,
        "STAGES": tiles.num_stages,
        "TEAM_REGISTERS": TEAM_REGISTERS,
        "COPYING_REGISTERS": COPYING_REGISTERS,
    }


@gluon.jit(do_not_specialize=["max_tiles", "num_rows"])
def _rounded_gemm(
    x,
    p_x_scales,
    weight,
    p_weight_scales,
    out,
    p_tiles,
    p_num_tiles,
    max_tiles,
    num_rows,
    n,
    k,
    IN_BLOCKS: gl.constexpr,
    TEAMS: gl.constexpr,
    STAGES: gl.constexpr,
    TEAM_REGISTERS: gl.constexpr,
    COPYING_REGISTERS: gl.constexpr,
):
    """Product of rows with the weights of their experts."""
    rings, staged = make_rings(x, weight, None, out, TEAMS, STAGES, False)
    work = (p_tiles, p_num_tiles, max_tiles)
    shape: gl.constexpr = (TEAMS, STAGES, IN_BLOCKS, 0)
    size = (num_rows, n, k)
    stored = (out, staged, p_x_scales, p_weight_scales)
    # Besides rows, the work list too is of a kernel that may still run.
    wait_for_inputs(True)
    release_dependents(True)
    gl.warp_specialize(
        [
            (_multiply, (rings, stored, work, size, 0, shape)),
            (_multiply, (rings, stored, work, size, 1, shape)),
            (copy_tiles, (x, weight, None, rings, work, n, k, shape)),
        ],
        [4, 1],
        [TEAM_REGISTERS, COPYING_REGISTERS],
    )


@gluon.jit
def _multiply(rings, stored, work, size, TEAM: gl.constexpr, shape: gl.constexpr):
    """Multiplies a team's rows of every tile of this program."""
    x_ring, w_ring, _up_ring, ready, free = rings
    out, staged, p_x_scales, p_weight_scales = stored
    num_rows, n, k = size
    TEAMS: gl.constexpr = shape[0]
    STAGES: gl.constexpr = shape[1]
    IN_BLOCKS: gl.constexpr = shape[2]
    ROWS: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    SUM: gl.constexpr = gl.int32 if x_ring.dtype == gl.int8 else gl.float32
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    mma_rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 32])
    num_n = gl.cdiv(n, BLOCK_N)
    num_tiles = gl.load(work[1]) * num_n
    num_steps = gl.cdiv(k, x_ring.shape[2])
    turn = 0
    which = 2 * TEAM
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, o_m, count = tile_of(work, i_tile // num_n)
        o_m += TEAM * ROWS
        o_n = i_tile % num_n * BLOCK_N
        if count > TEAM * ROWS:
            per_expert = n // BLOCK_OUTPUTS * num_steps if IN_BLOCKS else n
            scales = (p_x_scales, p_weight_scales + expert.to(gl.int64) * per_expert)
            o_row = o_m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))
            blocks = (scales, num_steps, o_row, num_rows, o_n, n)
            b_acc = gl.full([ROWS, BLOCK_N], 0, SUM, mma)
            # Tiles have no second part of columns.
            b_rest = gl.full([ROWS, 16], 0, SUM, mma_rest)
            factors = None
            if IN_BLOCKS:
                factors = factors_of(blocks, 0)
            for i in range(num_steps):
                slot = turn % STAGES
                b_scale = None
                if IN_BLOCKS:
                    b_scale, _rest = scales_of(factors, b_acc, b_rest)
                    # They arrive while the products of this step are made.
                    factors = factors_of(blocks, i + 1)
                hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
                b_w = w_ring.index(slot)
                tiles = (x_ring.index(TEAMS * slot + TEAM), b_w, b_w, free.index(slot))
                b_acc, b_rest = add_tile(tiles, b_acc, b_rest, b_scale, None, 0)
                turn += 1
            b_out = b_acc
            if not IN_BLOCKS:
                b_out = scaled(b_acc, scales[0], scales[1], o_m, o_n, num_rows, n)
            which = store_tile(b_out, out, staged, which, o_m, o_n)
        else:
            for _ in range(num_steps):
                slot = turn % STAGES
                hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
                hopper.mbarrier.arrive(free.index(slot), count=1)
                turn += 1
    hopper.tma.store_wait(0)
