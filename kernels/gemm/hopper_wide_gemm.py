"""x @ weight.T for many rows on Hopper: the arithmetic and the bits of `wide_gemm`, by warps with
roles.

One warp fills a ring of tiles by the copy engine, across the ends of tiles of the product. One or
two teams of four warps multiply, each its own rows of a tile, and store them while copies of the
next arrive. Every launch is dependent: it starts while the kernel before it ends, and waits for
that one before it reads or writes anything.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..launch import dependent_launch
from ..launch.hopper_copies import make_barriers, release_dependents, tiled, wait_for_inputs
from . import wide_tiles
from .wide_tiles import GROUP, TeamTiles

place = gluon.jit(wide_tiles.place.fn)

BLOCK_K = 64
"""Number of elements of K in a tile: a row of a tile is a line of shared memory."""
REGISTERS = 232
"""Registers of a thread of the second of two teams; the first has the rest, and the warp that
copies has 40."""


def hopper_wide_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: TeamTiles,
    *,
    num_programs: int,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N], all of one dtype of two
    bytes, in rows that the copy engine reads."""
    m, k = x.shape
    n = weight.shape[0]
    rows = tiles.team_rows
    first_n = tiles.first_n
    rest_n = tiles.block_n - tiles.first_n
    _hopper_wide_gemm[(min(tiles.count(m, n), num_programs),)](
        tiled(x, [rows, BLOCK_K]),
        tiled(weight, [first_n, BLOCK_K]),
        tiled(weight, [rest_n, BLOCK_K]) if rest_n else None,
        tiled(out, [rows, tiles.chunk]),
        tiled(out, [rows, rest_n]) if 0 < rest_n < tiles.chunk else None,
        m,
        n,
        k,
        **constants(tiles),
        num_warps=4,
        **dependent_launch.launch_options(True),
    )


def constants(tiles: TeamTiles) -> dict[str, int]:
    """Constants that the kernel is compiled for, besides the blocks of its descriptors."""
    return {
        "TEAMS": tiles.num_teams,
        "BLOCK_K": BLOCK_K,
        "STAGES": tiles.num_stages,
        "GROUP": GROUP,
        "REGISTERS": REGISTERS,
    }


@gluon.jit(do_not_specialize=["m"])
def _hopper_wide_gemm(
    x,
    weight,
    weight_rest,
    out,
    out_rest,
    m,
    n,
    k,
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
    # On an H200 an early start takes about 1 us off short products; long ones take as long
    # (2026-11-23).
    release_dependents(True)
    size = (m, n, k)
    shape: gl.constexpr = (TEAMS, ROWS, BLOCK_N, REST_N, BLOCK_K, STAGES, GROUP)
    stored = (out, out_rest, staged, staged_rest)
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
def make_rings(x, weight, weight_rest, out, out_rest, TEAMS: gl.constexpr, STAGES: gl.constexpr):
    """Rings of rows and of both parts of the weights with their barriers, and the places of chunks
    of the product; what is absent has that of the other part."""
    ROWS: gl.constexpr = x.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    x_ring = gl.allocate_shared_memory(x.dtype, [TEAMS * STAGES, ROWS, BLOCK_K], x.layout)
    w_ring = gl.allocate_shared_memory(
        weight.dtype, [STAGES, weight.block_shape[0], BLOCK_K], weight.layout
    )
    rest_ring = w_ring
    if weight_rest is not None:
        REST_N: gl.constexpr = weight_rest.block_shape[0]
        rest_ring = gl.allocate_shared_memory(
            weight.dtype, [STAGES, REST_N, BLOCK_K], weight_rest.layout
        )
    staged = gl.allocate_shared_memory(out.dtype, [2 * TEAMS, ROWS, out.block_shape[1]], out.layout)
    staged_rest = staged
    if out_rest is not None:
        staged_rest = gl.allocate_shared_memory(
            out.dtype, [TEAMS, ROWS, out_rest.block_shape[1]], out_rest.layout
        )
    ready, free = make_barriers(STAGES, READY=1, FREE=TEAMS)
    return (x_ring, w_ring, rest_ring, ready, free), staged, staged_rest


@gluon.jit
def copy_tiles(x, weight, weight_rest, rings, size, shape: gl.constexpr):
    """Fills the rings. The teams read nothing of an earlier kernel's output but what is copied
    here, and write nothing before they have it, so they need not wait for that kernel."""
    x_ring, w_ring, rest_ring, ready, free = rings
    m, n, k = size
    TEAMS: gl.constexpr = shape[0]
    ROWS: gl.constexpr = shape[1]
    BLOCK_N: gl.constexpr = shape[2]
    REST_N: gl.constexpr = shape[3]
    BLOCK_K: gl.constexpr = shape[4]
    STAGES: gl.constexpr = shape[5]
    GROUP: gl.constexpr = shape[6]
    BYTES: gl.constexpr = (
        (TEAMS * ROWS + BLOCK_N + REST_N) * BLOCK_K * x.dtype.primitive_bitwidth // 8
    )
    wait_for_inputs(True)
    num_tiles = gl.cdiv(m, TEAMS * ROWS) * gl.cdiv(n, BLOCK_N + REST_N)
    turn = 0
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        o_m, o_n = place(i_tile, m, n, TEAMS * ROWS, BLOCK_N + REST_N, GROUP)
        for o_k in range(0, k, BLOCK_K):
            slot = turn % STAGES
            is_ready = ready.index(slot)
            hopper.mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
            hopper.mbarrier.expect(is_ready, BYTES)
            for i in gl.static_range(TEAMS):
                x_tile = x_ring.index(TEAMS * slot + i)
                hopper.tma.async_copy_global_to_shared(x, [o_m + i * ROWS, o_k], is_ready, x_tile)
            hopper.tma.async_copy_global_to_shared(weight, [o_n, o_k], is_ready, w_ring.index(slot))
            if REST_N:
                rest_tile = rest_ring.index(slot)
                hopper.tma.async_copy_global_to_shared(
                    weight_rest, [o_n + BLOCK_N, o_k], is_ready, rest_tile
                )
            turn += 1


@gluon.jit
def _multiply(rings, stored, size, TEAM: gl.constexpr, shape: gl.constexpr):
    """Multiplies ROWS rows of every tile of this program."""
    x_ring, w_ring, rest_ring, ready, free = rings
    out, out_rest, staged, staged_rest = stored
    m, n, k = size
    TEAMS: gl.constexpr = shape[0]
    ROWS: gl.constexpr = shape[1]
    BLOCK_N: gl.constexpr = shape[2]
    REST_N: gl.constexpr = shape[3]
    STAGES: gl.constexpr = shape[5]
    GROUP: gl.constexpr = shape[6]
    # Products under way that do not read the tile before.
    PARTS: gl.constexpr = 2 if REST_N else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma_rest: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, REST_N if REST_N else 16, 16]
    )
    num_tiles = gl.cdiv(m, TEAMS * ROWS) * gl.cdiv(n, BLOCK_N + REST_N)
    num_steps = gl.cdiv(k, shape[4])
    turn = 0
    which = 2 * TEAM
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        o_m, o_n = place(i_tile, m, n, TEAMS * ROWS, BLOCK_N + REST_N, GROUP)
        b_acc = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, mma)
        if PARTS == 2:
            b_rest = gl.full([ROWS, REST_N], 0.0, gl.float32, mma_rest)
        for i in range(num_steps):
            slot = turn % STAGES
            hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
            b_x = x_ring.index(TEAMS * slot + TEAM)
            b_acc = hopper.warpgroup_mma(
                b_x, w_ring.index(slot).permute((1, 0)), b_acc, is_async=True
            )
            if PARTS == 2:
                b_rest = hopper.warpgroup_mma(
                    b_x, rest_ring.index(slot).permute((1, 0)), b_rest, is_async=True
                )
                b_acc, b_rest = hopper.warpgroup_mma_wait(2, deps=[b_acc, b_rest])
            else:
                b_acc = hopper.warpgroup_mma_wait(1, deps=[b_acc])
            # The tile before this one has been read.
            hopper.mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), count=1, pred=i > 0)
            turn += 1
        if PARTS == 2:
            b_acc, b_rest = hopper.warpgroup_mma_wait(0, deps=[b_acc, b_rest])
        else:
            b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
        hopper.mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), count=1)
        which = store_tile(b_acc, out, staged, which, o_m + TEAM * ROWS, o_n)
        if PARTS == 2:
            if out_rest is None:
                which = store_tile(b_rest, out, staged, which, o_m + TEAM * ROWS, o_n + BLOCK_N)
            else:
                # The single buffer has been read: other chunks have been copied since.
                store_tile(b_rest, out_rest, staged_rest, TEAM, o_m + TEAM * ROWS, o_n + BLOCK_N)
    hopper.tma.store_wait(0)


@gluon.jit
def store_tile(b_acc, out, staged, which, o_m, o_n):
    """Stores a tile of the product, in chunks of columns that take turns in two places of shared
    memory. Returns the place of the next chunk."""
    CHUNK: gl.constexpr = out.block_shape[1]
    ROWS: gl.constexpr = b_acc.shape[0]
    HALF: gl.constexpr = b_acc.shape[1] // 2
    if b_acc.shape[1] > CHUNK:
        b_left, b_right = gl.split(gl.permute(gl.reshape(b_acc, (ROWS, 2, HALF)), (0, 2, 1)))
        which = store_tile(b_left, out, staged, which, o_m, o_n)
        which = store_tile(b_right, out, staged, which, o_m, o_n + HALF)
    else:
        # The copy before the last has been read from here.
        hopper.tma.store_wait(1)
        gl.thread_barrier()
        chunk = staged.index(which)
        chunk.store(b_acc.to(out.dtype))
        hopper.fence_async_shared()
        gl.thread_barrier()
        hopper.tma.async_copy_shared_to_global(out, [o_m, o_n], chunk)
        which = which ^ 1
    return which
