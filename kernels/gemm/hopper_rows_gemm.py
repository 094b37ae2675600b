"""x @ weight.T, with gates or without, for some dozen to some hundred rows on Hopper: the bits of
`gemm`.

Time goes in starting, not in bytes: a program is launched while the kernel before it ends, fills
shared memory with the weights it is to read, and asks for its rows only when they are there. K is
never split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..attention import hopper_attention
from ..launch import dependent_launch
from ..launch.hopper_copies import make_barriers, release_dependents, tiled, wait_for_inputs
from ..norm import silu_mul

gated = gluon.jit(silu_mul.gated.fn)


@dataclass(frozen=True, slots=True)
class RowTiles:
    block_m: int
    """Number of rows in a tile, 64 for each team of four warps."""
    block_n: int
    """Number of columns in a tile. With gates, half of them are gates and the others are the
    columns that they gate."""
    block_k: int
    num_stages: int
    """Number of tiles of x and of weights in shared memory."""


def serves(x: torch.Tensor, weight: torch.Tensor, tiles: RowTiles, *, gates: bool) -> bool:
    """Whether these are multiplied here, in tiles that are whole but for the rows."""
    n, k = weight.shape
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and n % (tiles.block_n * (2 if gates else 1)) == k % tiles.block_k == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and hopper_attention.is_hopper(x.device)
    )


def rows_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: RowTiles,
    *,
    gates: bool,
    dependent: bool,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N]; with gates, the first half of
    the weights, [M, N / 2] as `silu_mul`."""
    m, k = x.shape
    n = out.shape[1]
    assert serves(x, weight, tiles, gates=gates)
    assert out.is_contiguous()
    _rows_gemm[(n // tiles.block_n, triton.cdiv(m, tiles.block_m))](
        tiled(x, [tiles.block_m, tiles.block_k]),
        tiled(weight, [tiles.block_n, tiles.block_k]),
        out,
        m,
        n,
        k,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        STAGES=min(tiles.num_stages, k // tiles.block_k),
        GATES=gates,
        DEPENDENT=dependent,
        num_warps=tiles.block_m // 16,
        # A thread takes no more than it needs: programs of the next kernels find room beside these.
        maxnreg=112 if gates and tiles.block_n > 32 else 80,
        **dependent_launch.launch_options(dependent),
    )


@gluon.jit(do_not_specialize=["m"])
def _rows_gemm(
    x,
    weight,
    p_out,
    m,
    n,
    k,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GATES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    PARTS: gl.constexpr = 2 if GATES else 1
    o_n = gl.program_id(0) * BLOCK_N
    o_m = gl.program_id(1) * BLOCK_M
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    w_ring = gl.allocate_shared_memory(
        weight.dtype, [PARTS * STAGES, BLOCK_N, BLOCK_K], weight.layout
    )
    ready, free = make_barriers(STAGES, READY=1, FREE=1)
    release_dependents(DEPENDENT)
    rings = (x_ring, w_ring, ready, free)
    shape: gl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PARTS)
    gl.warp_specialize(
        [
            (_multiply, (rings, p_out, o_m, o_n, m, n, k, shape)),
            (_copy_tiles, (x, weight, rings, o_m, o_n, n, k, DEPENDENT, shape)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _copy_tiles(x, weight, rings, o_m, o_n, n, k, DEPENDENT: gl.constexpr, shape: gl.constexpr):
    """Fills the rings, with weights before the previous kernel has ended. The other warps read
    nothing of that kernel's output but what is copied here, so they need not wait for it."""
    x_ring, _, ready, free = rings
    BLOCK_K: gl.constexpr = shape[2]
    STAGES: gl.constexpr = shape[3]
    for i in range(STAGES):
        _copy_weights(x, weight, rings, i, o_n, n, i * BLOCK_K, shape)
    wait_for_inputs(DEPENDENT)
    for i in range(STAGES):
        hopper.tma.async_copy_global_to_shared(
            x, [o_m, i * BLOCK_K], ready.index(i), x_ring.index(i)
        )
    for i in range(STAGES, k // BLOCK_K):
        slot = i % STAGES
        hopper.mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        _copy_weights(x, weight, rings, slot, o_n, n, i * BLOCK_K, shape)
        hopper.tma.async_copy_global_to_shared(
            x, [o_m, i * BLOCK_K], ready.index(slot), x_ring.index(slot)
        )


@gluon.jit
def _copy_weights(x, weight, rings, slot, o_n, n, o_k, shape: gl.constexpr):
    """Copies the weights of a tile whose rows of x follow on the same barrier."""
    _, w_ring, ready, _ = rings
    PARTS: gl.constexpr = shape[4]
    is_ready = ready.index(slot)
    hopper.mbarrier.expect(is_ready, x.block_type.nbytes + PARTS * weight.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(weight, [o_n, o_k], is_ready, w_ring.index(PARTS * slot))
    if PARTS == 2:
        hopper.tma.async_copy_global_to_shared(
            weight, [n + o_n, o_k], is_ready, w_ring.index(PARTS * slot + 1)
        )


@gluon.jit
def _multiply(rings, p_out, o_m, o_n, m, n, k, shape: gl.constexpr):
    x_ring, w_ring, ready, free = rings
    BLOCK_M: gl.constexpr = shape[0]
    BLOCK_N: gl.constexpr = shape[1]
    STAGES: gl.constexpr = shape[3]
    PARTS: gl.constexpr = shape[4]
    WARPS: gl.constexpr = BLOCK_M // 16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // BLOCK_N, BLOCK_N // 8], [WARPS, 1], [1, 0]
    )
    b_acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, mma)
    b_up = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, mma)
    num_tiles = k // shape[2]
    for i in range(num_tiles):
        slot = i % STAGES
        hopper.mbarrier.wait(ready.index(slot), i // STAGES & 1)
        b_x = x_ring.index(slot)
        b_acc = hopper.warpgroup_mma(
            b_x, w_ring.index(PARTS * slot).permute((1, 0)), b_acc, is_async=True
        )
        if PARTS == 2:
            b_up = hopper.warpgroup_mma(
                b_x, w_ring.index(PARTS * slot + 1).permute((1, 0)), b_up, is_async=True
            )
            b_acc, b_up = hopper.warpgroup_mma_wait(2, deps=[b_acc, b_up])
        else:
            b_acc = hopper.warpgroup_mma_wait(1, deps=[b_acc])
        # The tile before this one has been read.
        if (i > 0) & (i - 1 + STAGES < num_tiles):
            hopper.mbarrier.arrive(free.index((i - 1) % STAGES), count=1)
    dtype: gl.constexpr = p_out.dtype.element_ty
    if PARTS == 2:
        b_acc, b_up = hopper.warpgroup_mma_wait(0, deps=[b_acc, b_up])
        # Rounded as a product that is stored.
        b_out = gated(b_acc.to(dtype).to(gl.float32), b_up.to(dtype).to(gl.float32)).to(dtype)
    else:
        b_out = hopper.warpgroup_mma_wait(0, deps=[b_acc]).to(dtype)
    b_out = gl.convert_layout(b_out, wide)
    o_row = o_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, wide))
    o_column = o_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, wide))
    gl.store(
        p_out + o_row.to(gl.int64)[:, None] * n + o_column[None, :],
        b_out,
        mask=(o_row < m)[:, None],
    )
