"""Products of many rows with the weights of their experts on Hopper: the arithmetic, the warps with
roles and the bits of `hopper_wide_gemm`, over tiles of a work list.

Rows are sorted by expert, each expert's first one at a multiple of 64: a team's rows. A tile has
one expert. A team without rows in a tile multiplies nothing, so that at most 63 rows an expert are
in vain. The copy engine reads sorted rows; rows that are still in the order of tokens are gathered
by four warps of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..gemm.hopper_wide_gemm import BLOCK_K, store_tile
from ..launch import dependent_launch
from ..launch.hopper_copies import make_barriers, release_dependents, tiled, wait_for_inputs
from ..norm import silu_mul
from .work_list import WorkList

gated = gluon.jit(silu_mul.gated.fn)
gelu_gated = gluon.jit(silu_mul.gelu_gated.fn)

TEAM_ROWS = 64
TEAM_REGISTERS = 232
TEAM_REGISTERS_BESIDE_GATHERING = 208
GATHERING_REGISTERS = 56
COPYING_REGISTERS = 40
"""Registers of a thread of the second of two teams, of the warps that gather, and of the warp that
has the copy engine copy; the first team has the rest."""


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    num_teams: int
    block_n: int
    """Number of weights in a tile. With gates, half of them are gates and the others what they
    gate."""
    num_stages: int
    chunk: int = 64
    """Number of outputs that a team stores at a time."""

    @property
    def block_m(self) -> int:
        return self.num_teams * TEAM_ROWS


TILES = GroupedTiles(2, 256, 4)


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    work: WorkList,
    tiles: GroupedTiles = TILES,
    *,
    num_programs: int,
    gates: bool,
    is_gelu: bool = False,
    shared_by: int = 0,
) -> None:
    """Writes the product of sorted rows x [rows, K] and their experts' weights [E, N, K] to sorted
    out [rows, N]; with gates, gates first, [rows, N / 2] as `silu_mul` or `gelu_tanh_mul`. With
    `shared_by`, x is not sorted and has a row for so many pairs, [T, K]."""
    k = x.shape[1]
    n = out.shape[1]
    assert work.block_m == tiles.block_m
    assert weight.is_contiguous()
    rows = weight.view(-1, k)
    block_n = tiles.block_n // (2 if gates else 1)
    weights = tiled(rows, [block_n, BLOCK_K])
    assert x.stride(1) == 1
    assert shared_by == 0 or tiles.num_teams == 2
    _grouped_gemm[(num_programs,)](
        tiled(x, [TEAM_ROWS, BLOCK_K]),
        x if shared_by else None,
        weights,
        weights if gates else None,
        tiled(out, [TEAM_ROWS, tiles.chunk]),
        work.pairs if shared_by else None,
        work.tiles,
        work.num_tiles,
        work.max_tiles,
        x.stride(0),
        n,
        k,
        **constants(tiles, is_gelu=is_gelu, shared_by=shared_by),
        num_warps=4,
        **dependent_launch.launch_options(True),
    )


def constants(tiles: GroupedTiles, *, is_gelu: bool, shared_by: int) -> dict[str, int | bool]:
    """Constants that the kernel is compiled for, besides the blocks of its descriptors."""
    return {
        "GELU": is_gelu,
        "SHARED_BY": shared_by,
        "TEAMS": tiles.num_teams,
        "STAGES": tiles.num_stages,
        "TEAM_REGISTERS": TEAM_REGISTERS_BESIDE_GATHERING if shared_by else TEAM_REGISTERS,
        "GATHERING_REGISTERS": GATHERING_REGISTERS,
        "COPYING_REGISTERS": COPYING_REGISTERS,
    }


@gluon.jit(do_not_specialize=["max_tiles"])
def _grouped_gemm(
    x,
    p_x,
    weight,
    weight_up,
    out,
    p_pairs,
    p_tiles,
    p_num_tiles,
    max_tiles,
    stride_x,
    n,
    k,
    GELU: gl.constexpr,
    SHARED_BY: gl.constexpr,
    TEAMS: gl.constexpr,
    STAGES: gl.constexpr,
    TEAM_REGISTERS: gl.constexpr,
    GATHERING_REGISTERS: gl.constexpr,
    COPYING_REGISTERS: gl.constexpr,
):
    """Product of rows with the weights of their experts. Rows are gathered where p_x is given."""
    rings, staged = make_rings(x, weight, weight_up, out, TEAMS, STAGES, p_x is not None)
    work = (p_tiles, p_num_tiles, max_tiles)
    shape: gl.constexpr = (TEAMS, STAGES, GELU, SHARED_BY)
    copied = (x, weight, weight_up, rings, work, n, k, shape)
    multiplied = (rings, out, staged, weight_up, work, n, k)
    # Besides rows, the work list too is of a kernel that may still run.
    wait_for_inputs(True)
    release_dependents(True)
    if SHARED_BY:
        gathered = (p_x, p_pairs, rings, work, stride_x, n, k, shape)
        gl.warp_specialize(
            [
                (_multiply, (multiplied, 0, shape)),
                (_multiply, (multiplied, 1, shape)),
                (_gather_rows, gathered),
                (copy_tiles, copied),
            ],
            [4, 4, 1],
            [TEAM_REGISTERS, GATHERING_REGISTERS, COPYING_REGISTERS],
        )
    elif TEAMS == 2:
        gl.warp_specialize(
            [
                (_multiply, (multiplied, 0, shape)),
                (_multiply, (multiplied, 1, shape)),
                (copy_tiles, copied),
            ],
            [4, 1],
            [TEAM_REGISTERS, COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_multiply, (multiplied, 0, shape)), (copy_tiles, copied)],
            [1],
            [COPYING_REGISTERS],
        )


@gluon.jit
def make_rings(
    x,
    weight,
    weight_up,
    out,
    TEAMS: gl.constexpr,
    STAGES: gl.constexpr,
    GATHERS: gl.constexpr,
):
    """Rings of rows and of weights with their barriers, and the places of chunks of the product.
    Without gates, gates are in the place of what they gate."""
    ROWS: gl.constexpr = x.block_shape[0]
    BLOCK_N: gl.constexpr = weight.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    x_ring = gl.allocate_shared_memory(x.dtype, [TEAMS * STAGES, ROWS, BLOCK_K], x.layout)
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    up_ring = w_ring
    if weight_up is not None:
        up_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    staged = gl.allocate_shared_memory(out.dtype, [2 * TEAMS, ROWS, out.block_shape[1]], out.layout)
    # Each thread that gathers arrives too.
    ready, free = make_barriers(STAGES, READY=1 + (128 if GATHERS else 0), FREE=TEAMS)
    return (x_ring, w_ring, up_ring, ready, free), staged


@gluon.jit
def tile_of(work, i_m):
    """Expert, first row and number of rows."""
    p_tiles, _, max_tiles = work
    expert = gl.load(p_tiles + i_m)
    first = gl.load(p_tiles + max_tiles + i_m)
    count = gl.load(p_tiles + 2 * max_tiles + i_m)
    return expert, first, count


@gluon.jit
def copy_tiles(x, weight, weight_up, rings, work, n, k, shape: gl.constexpr):
    """Fills the rings. Rows of a team that has none in a tile are not copied."""
    x_ring, w_ring, up_ring, ready, free = rings
    TEAMS: gl.constexpr = shape[0]
    STAGES: gl.constexpr = shape[1]
    ROWS: gl.constexpr = x.block_shape[0]
    BLOCK_N: gl.constexpr = weight.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    GATHERED: gl.constexpr = shape[3] != 0
    PARTS: gl.constexpr = 1 if weight_up is None else 2
    BYTES: gl.constexpr = PARTS * weight.block_type.nbytes
    ROW_BYTES: gl.constexpr = x.block_type.nbytes
    num_n = gl.cdiv(n, BLOCK_N)
    num_tiles = gl.load(work[1]) * num_n
    turn = 0
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, o_m, count = tile_of(work, i_tile // num_n)
        o_n = expert * (PARTS * n) + i_tile % num_n * BLOCK_N
        is_full = count > ROWS
        for o_k in range(0, k, BLOCK_K):
            slot = turn % STAGES
            is_ready = ready.index(slot)
            hopper.mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
            if GATHERED:
                hopper.mbarrier.expect(is_ready, BYTES)
            else:
                x_tile = x_ring.index(TEAMS * slot)
                if TEAMS == 1:
                    hopper.mbarrier.expect(is_ready, BYTES + ROW_BYTES)
                else:
                    hopper.mbarrier.expect(is_ready, BYTES + ROW_BYTES, pred=count <= ROWS)
                    hopper.mbarrier.expect(is_ready, BYTES + 2 * ROW_BYTES, pred=is_full)
                    other = x_ring.index(TEAMS * slot + 1)
                    hopper.tma.async_copy_global_to_shared(
                        x, [o_m + ROWS, o_k], is_ready, other, pred=is_full
                    )
                hopper.tma.async_copy_global_to_shared(x, [o_m, o_k], is_ready, x_tile)
            hopper.tma.async_copy_global_to_shared(weight, [o_n, o_k], is_ready, w_ring.index(slot))
            if PARTS == 2:
                hopper.tma.async_copy_global_to_shared(
                    weight_up, [o_n + n, o_k], is_ready, up_ring.index(slot)
                )
            turn += 1


@gluon.jit
def _gather_rows(p_x, p_pairs, rings, work, stride_x, n, k, shape: gl.constexpr):
    """Fills the ring of rows, from tokens; K is a multiple of a tile's inputs."""
    x_ring, w_ring, _up_ring, ready, free = rings
    STAGES: gl.constexpr = shape[1]
    SHARED_BY: gl.constexpr = shape[3]
    ROWS: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    # A thread copies 16 bytes at a time, eight of them a row.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    o_i = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    num_n = gl.cdiv(n, BLOCK_N)
    num_tiles = gl.load(work[1]) * num_n
    turn = 0
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _expert, o_m, count = tile_of(work, i_tile // num_n)
        # Rows past the last one are the first token's.
        b_pair = gl.load(p_pairs + o_m + o_row, mask=o_row < count, other=0)
        b_other = gl.load(p_pairs + o_m + ROWS + o_row, mask=ROWS + o_row < count, other=0)
        p_row = p_x + (b_pair // SHARED_BY).to(gl.int64)[:, None] * stride_x + o_i[None, :]
        p_other = p_x + (b_other // SHARED_BY).to(gl.int64)[:, None] * stride_x + o_i[None, :]
        for o_k in range(0, k, BLOCK_K):
            slot = turn % STAGES
            hopper.mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
            async_copy.async_copy_global_to_shared(x_ring.index(2 * slot), p_row + o_k)
            if count > ROWS:
                async_copy.async_copy_global_to_shared(x_ring.index(2 * slot + 1), p_other + o_k)
            async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
            turn += 1


@gluon.jit
def _multiply(multiplied, TEAM: gl.constexpr, shape: gl.constexpr):
    """Multiplies a team's rows of every tile of this program."""
    rings, out, staged, weight_up, work, n, k = multiplied
    x_ring, w_ring, up_ring, ready, free = rings
    TEAMS: gl.constexpr = shape[0]
    STAGES: gl.constexpr = shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    PARTS: gl.constexpr = 1 if weight_up is None else 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    num_n = gl.cdiv(n, BLOCK_N)
    num_tiles = gl.load(work[1]) * num_n
    num_steps = gl.cdiv(k, x_ring.shape[2])
    turn = 0
    which = 2 * TEAM
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, o_m, count = tile_of(work, i_tile // num_n)
        o_n = i_tile % num_n * BLOCK_N
        if count > TEAM * ROWS:
            b_acc = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, mma)
            b_up = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, mma)
            for i in range(num_steps):
                slot = turn % STAGES
                hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
                if shape[3]:
                    # Rows that warps copied become visible to the matrix unit.
                    hopper.fence_async_shared()
                b_x = x_ring.index(TEAMS * slot + TEAM)
                b_acc = hopper.warpgroup_mma(
                    b_x, w_ring.index(slot).permute((1, 0)), b_acc, is_async=True
                )
                if PARTS == 2:
                    b_up = hopper.warpgroup_mma(
                        b_x, up_ring.index(slot).permute((1, 0)), b_up, is_async=True
                    )
                    b_acc, b_up = hopper.warpgroup_mma_wait(2, deps=[b_acc, b_up])
                else:
                    b_acc = hopper.warpgroup_mma_wait(1, deps=[b_acc])
                # The tile before this one has been read.
                before = free.index((turn + STAGES - 1) % STAGES)
                hopper.mbarrier.arrive(before, count=1, pred=i > 0)
                turn += 1
            if PARTS == 2:
                b_acc, b_up = hopper.warpgroup_mma_wait(0, deps=[b_acc, b_up])
            else:
                b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
            hopper.mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), count=1)
            if PARTS == 2:
                # Rounded as a product that is stored.
                b_gate = b_acc.to(out.dtype).to(gl.float32)
                b_up = b_up.to(out.dtype).to(gl.float32)
                b_acc = gelu_gated(b_gate, b_up) if shape[2] else gated(b_gate, b_up)
            which = store_tile(b_acc, out, staged, which, o_m + TEAM * ROWS, o_n)
        else:
            for _ in range(num_steps):
                slot = turn % STAGES
                hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
                hopper.mbarrier.arrive(free.index(slot), count=1)
                turn += 1
    hopper.tma.store_wait(0)
