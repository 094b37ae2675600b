"""x @ weight.T, with gates or without, for up to sixteen rows on Hopper, of weights that shared
memory holds: the bits of `gemm`.

A program is launched while kernels before it run, and all weights that it multiplies are in shared
memory before its rows are there; then only rows are read. So memory works while other kernels wait
for one another. K is never split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..attention import hopper_attention
from ..launch import dependent_launch
from ..launch.hopper_copies import release_dependents, tiled, wait_for_inputs
from ..norm import silu_mul

gated = gluon.jit(silu_mul.gated.fn)

BLOCK_M = gl.constexpr(64)
"""Number of rows that the matrix unit multiplies at once."""
BLOCK_K = gl.constexpr(64)
"""Number of inputs in a tile: 128 bytes, one line of shared memory as the matrix unit reads it."""
TILES_AT_ONCE = (4, 5)
"""Numbers of tiles that one barrier waits for: the first one that divides all of them."""
LARGEST_PART = gl.constexpr(15)
"""Exponent of the size of the largest part of a row that is read at once."""
ROW_SIZE = gl.constexpr(8)
ROW_SIZES = (ROW_SIZE.value, 16)
"""Numbers of rows that are copied; those past the last row are zeros."""
SHARED_BYTES = 170 << 10
"""Most bytes of a program's shared memory: the rest is for kernels that run beside it."""


@dataclass(frozen=True, slots=True)
class FewRowTiles:
    block_n: int
    """Number of columns that a program computes; with gates, as many gates and as many columns that
    they gate."""

    def shared_bytes(self, num_rows: int, k: int, *, gates: bool) -> int:
        """Bytes of a program's tiles, for rows of k inputs of which num_rows are copied."""
        block_k: int = BLOCK_K.value
        num_tiles = k // block_k
        columns = self.block_n * (2 if gates else 1)
        # Behind the last tile lie as many rows as the matrix unit reads there.
        rows: int = num_tiles * num_rows + BLOCK_M.value - num_rows
        return 2 * block_k * (rows + num_tiles * columns)


def serves(x: torch.Tensor, weight: torch.Tensor, tiles: FewRowTiles, *, gates: bool) -> bool:
    """Whether x [M, K] and weight [N, K] are multiplied here, in tiles that are whole but for the
    rows."""
    (n, k), m = weight.shape, x.shape[0]
    return (
        m <= ROW_SIZES[-1]
        and x.dtype == weight.dtype == torch.bfloat16
        and n % (tiles.block_n * (2 if gates else 1)) == k % BLOCK_K.value == 0
        and tiles_at_once(k) > 0
        and tiles.shared_bytes(row_size(m), k, gates=gates) <= SHARED_BYTES
        and x.is_contiguous()
        and weight.is_contiguous()
        and hopper_attention.is_hopper(x.device)
    )


def few_rows_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: FewRowTiles,
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
    _few_rows_gemm[(n // tiles.block_n,)](
        None if m == 1 else tiled(x, [row_size(m), BLOCK_K.value]),
        tiled(weight, [tiles.block_n, BLOCK_K.value]),
        x,
        out,
        m,
        n,
        K=k,
        AT_ONCE=tiles_at_once(k),
        NUM_ROWS=row_size(m),
        GATES=gates,
        DEPENDENT=dependent,
        num_warps=4,
        **dependent_launch.launch_options(dependent),
    )


def row_size(m: int) -> int:
    return next(size for size in ROW_SIZES if m <= size)


def tiles_at_once(k: int) -> int:
    """Number of tiles that one barrier waits for; 0: rows of k inputs are cut into none such."""
    num_tiles = k // BLOCK_K.value
    return next((count for count in TILES_AT_ONCE if num_tiles % count == 0), 0)


@gluon.jit(do_not_specialize=["m"])
def _few_rows_gemm(
    x,
    weight,
    p_x,
    p_out,
    m,
    n,
    K: gl.constexpr,
    AT_ONCE: gl.constexpr,
    NUM_ROWS: gl.constexpr,
    GATES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    PARTS: gl.constexpr = 2 if GATES else 1
    NUM_TILES: gl.constexpr = K // BLOCK_K
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    o_n = gl.program_id(0) * BLOCK_N
    # The matrix unit reads 64 rows from where those of a tile begin. The first NUM_ROWS are the
    # tile's; the others are rows of the tiles that follow, and their products are not stored.
    slab: gl.constexpr = gl.NVMMASharedLayout.get_default_for([NUM_ROWS, BLOCK_K], gl.bfloat16)
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_TILES + BLOCK_M // NUM_ROWS - 1, NUM_ROWS, BLOCK_K], slab
    )
    both: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [PARTS * BLOCK_N, BLOCK_K], gl.bfloat16
    )
    w_tiles = gl.allocate_shared_memory(weight.dtype, [NUM_TILES, PARTS * BLOCK_N, BLOCK_K], both)
    ready = gl.allocate_shared_memory(
        gl.int64, [NUM_TILES // AT_ONCE, 1], hopper.mbarrier.MBarrierLayout()
    )
    for i in gl.static_range(NUM_TILES // AT_ONCE):
        hopper.mbarrier.init(ready.index(i), count=1)
    hopper.fence_async_shared()
    release_dependents(DEPENDENT)
    NUM_BYTES: gl.constexpr = PARTS * weight.block_type.nbytes + (
        0 if x is None else 2 * NUM_ROWS * BLOCK_K
    )
    for i in range(NUM_TILES):
        is_ready = ready.index(i // AT_ONCE)
        if i % AT_ONCE == 0:
            hopper.mbarrier.expect(is_ready, AT_ONCE * NUM_BYTES)
        for part in gl.static_range(PARTS):
            where = [part * n + o_n, i * BLOCK_K]
            columns = w_tiles.index(i).slice(part * BLOCK_N, BLOCK_N, dim=0)
            hopper.tma.async_copy_global_to_shared(weight, where, is_ready, columns)
    if x is None:
        read_row(p_x, x_tiles, K, DEPENDENT)
    else:
        wait_for_inputs(DEPENDENT)
        for i in range(NUM_TILES):
            where = [0, i * BLOCK_K]
            hopper.tma.async_copy_global_to_shared(
                x, where, ready.index(i // AT_ONCE), x_tiles.index(i)
            )
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PARTS * BLOCK_N, 16])
    b_acc = gl.full([BLOCK_M, PARTS * BLOCK_N], 0.0, gl.float32, mma)
    b_acc = multiply_tiles(x_tiles, w_tiles, ready, b_acc, AT_ONCE)
    dtype: gl.constexpr = p_out.dtype.element_ty
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    b_out = b_acc.to(dtype)
    if GATES:
        # Rounded as a product that is stored.
        b_gate, b_up = gl.split(gl.permute(gl.reshape(b_out, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
        b_out = gated(b_gate.to(gl.float32), b_up.to(gl.float32)).to(dtype)
    b_out = gl.convert_layout(b_out, out)
    o_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, out))
    o_column = o_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, out))
    gl.store(
        p_out + o_row.to(gl.int64)[:, None] * n + o_column[None, :],
        b_out,
        mask=(o_row < m)[:, None],
    )


@gluon.jit
def multiply_tiles(x_tiles, w_tiles, ready, b_acc, AT_ONCE: gl.constexpr):
    """Adds products of rows and weights to b_acc [64, N], as a barrier for each AT_ONCE tiles says
    that these are there."""
    whole: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], gl.bfloat16)
    for i in range(w_tiles.shape[0] // AT_ONCE):
        hopper.mbarrier.wait(ready.index(i), 0)
        for j in gl.static_range(AT_ONCE):
            i_tile = i * AT_ONCE + j
            b_x = x_tiles.index(i_tile)._reinterpret(gl.bfloat16, [BLOCK_M, BLOCK_K], whole)
            b_acc = hopper.warpgroup_mma(
                b_x, w_tiles.index(i_tile).permute((1, 0)), b_acc, is_async=True
            )
        b_acc = hopper.warpgroup_mma_wait(1, deps=[b_acc])
    return hopper.warpgroup_mma_wait(0, deps=[b_acc])


@gluon.jit
def read_row(p_x, x_tiles, K: gl.constexpr, DEPENDENT: gl.constexpr):
    """Writes one row [K] to the first rows of its tiles, whose numbers shared memory does not
    permute. It is there sooner than what the copy engine copies."""
    wait_for_inputs(DEPENDENT)
    # Parts whose sizes are powers of two, the largest one first.
    for i in gl.static_range(LARGEST_PART, 5, -1):
        if K >> i & 1:
            _read_part(p_x, x_tiles, K >> i + 1 << i + 1, 1 << i)
    hopper.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _read_part(p_x, x_tiles, FIRST: gl.constexpr, SIZE: gl.constexpr):
    NUM_TILES: gl.constexpr = SIZE // BLOCK_K
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    b_x = gl.load(p_x + FIRST + gl.arange(0, SIZE, layout=layout))
    tiles = x_tiles.index(FIRST // BLOCK_K)._reinterpret(
        gl.bfloat16, [NUM_TILES, ROW_SIZE * BLOCK_K], flat
    )
    tiles.slice(0, BLOCK_K, dim=1).store(gl.reshape(b_x, [NUM_TILES, BLOCK_K]))
