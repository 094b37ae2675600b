"""x @ weight.T for up to sixteen rows on Hopper, of weights that shared memory does not hold: the
bits of `gemm`.

As `hopper_few_rows_gemm`, with a ring of weights: as many as shared memory holds are there before
the rows are, and the copy engine replaces those that have been multiplied. K is never split. A
second weight of the same inputs is multiplied by further programs of the launch.
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
from .hopper_few_rows_gemm import (
    BLOCK_K,
    BLOCK_M,
    ROW_SIZES,
    read_row,
    row_size,
)


@dataclass(frozen=True, slots=True)
class RingTiles:
    first_n: int
    """Number of columns that a program computes, a power of two."""
    rest_n: int
    """Number of columns behind these, another power of two or 0."""
    at_once: int
    """Number of tiles of weights that one barrier waits for."""
    most_bytes: int
    """Most bytes of a program's shared memory. Kernels behind it read their own weights and states
    early in what it leaves."""

    @property
    def block_n(self) -> int:
        return self.first_n + self.rest_n

    def num_groups(self, num_rows: int, k: int) -> int:
        """Number of groups of weight tiles in the ring, for rows of k inputs."""
        block_k: int = BLOCK_K.value
        num_tiles = k // block_k
        rows: int = num_tiles * num_rows + BLOCK_M.value - num_rows
        left = self.most_bytes - 2 * block_k * rows
        return min(left // (2 * block_k * self.block_n * self.at_once), num_tiles // self.at_once)


def serves(x: torch.Tensor, weight: torch.Tensor, tiles: RingTiles) -> bool:
    """Whether x [M, K] and weight [N, K] are multiplied here."""
    (n, k), m = weight.shape, x.shape[0]
    return (
        m <= ROW_SIZES[-1]
        and x.dtype == weight.dtype == torch.bfloat16
        and n % tiles.block_n == k % (BLOCK_K.value * tiles.at_once) == 0
        and tiles.num_groups(row_size(m), k) > 1
        and x.is_contiguous()
        and weight.is_contiguous()
        and hopper_attention.is_hopper(x.device)
    )


def has_room(tiles: RingTiles, weight: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a second weight is multiplied in the launch of a weight."""
    return (
        second.dtype == weight.dtype
        and second.shape[1] == weight.shape[1]
        and len(second) % tiles.first_n == 0
        and second.is_contiguous()
    )


def ring_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: RingTiles,
    *,
    second: torch.Tensor | None = None,
    second_out: torch.Tensor | None = None,
    dependent: bool,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N], and that of x and second
    [N', K], whose rows are a multiple of `first_n`, to second_out [M, N']."""
    m, k = x.shape
    n = out.shape[1]
    assert serves(x, weight, tiles)
    assert out.is_contiguous()
    num_rows = row_size(m)
    block_k: int = BLOCK_K.value
    programs = n // tiles.block_n
    if second is not None:
        assert has_room(tiles, weight, second)
        programs += len(second) // tiles.first_n
    _ring_gemm[(programs,)](
        None if m == 1 else tiled(x, [num_rows, block_k]),
        tiled(weight, [tiles.first_n, block_k]),
        tiled(weight, [tiles.rest_n, block_k]) if tiles.rest_n else None,
        None if second is None else tiled(second, [tiles.first_n, block_k]),
        x,
        out,
        second_out,
        m,
        n,
        0 if second is None else len(second),
        K=k,
        AT_ONCE=tiles.at_once,
        NUM_GROUPS=tiles.num_groups(num_rows, k),
        NUM_ROWS=num_rows,
        DEPENDENT=dependent,
        num_warps=4,
        **dependent_launch.launch_options(dependent),
    )


@gluon.jit(do_not_specialize=["m"])
def _ring_gemm(
    x,
    first,
    rest,
    second,
    p_x,
    p_out,
    p_second_out,
    m,
    n,
    second_n,
    K: gl.constexpr,
    AT_ONCE: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    NUM_ROWS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    NUM_TILES: gl.constexpr = K // BLOCK_K
    FIRST_N: gl.constexpr = first.block_type.shape[0]
    REST_N: gl.constexpr = 0 if rest is None else rest.block_type.shape[0]
    BLOCK_N: gl.constexpr = FIRST_N + REST_N
    slab: gl.constexpr = gl.NVMMASharedLayout.get_default_for([NUM_ROWS, BLOCK_K], gl.bfloat16)
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_TILES + BLOCK_M // NUM_ROWS - 1, NUM_ROWS, BLOCK_K], slab
    )
    first_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_GROUPS * AT_ONCE, FIRST_N, BLOCK_K], first.layout
    )
    if REST_N > 0:
        rest_tiles = gl.allocate_shared_memory(
            gl.bfloat16, [NUM_GROUPS * AT_ONCE, REST_N, BLOCK_K], rest.layout
        )
    else:
        rest_tiles = first_tiles
    ready = gl.allocate_shared_memory(
        gl.int64, [NUM_GROUPS + 1, 1], hopper.mbarrier.MBarrierLayout()
    )
    for i in gl.static_range(NUM_GROUPS + 1):
        hopper.mbarrier.init(ready.index(i), count=1)
    hopper.fence_async_shared()
    release_dependents(DEPENDENT)
    num_first = n // BLOCK_N
    is_second = gl.program_id(0) >= num_first
    o_n = gl.program_id(0) * BLOCK_N
    if is_second:
        o_n = (gl.program_id(0) - num_first) * FIRST_N
    weights = (first, rest, second, first_tiles, rest_tiles, ready)
    for i in range(NUM_GROUPS):
        _fill(weights, i, is_second, o_n, AT_ONCE, NUM_GROUPS)
    if x is None:
        read_row(p_x, x_tiles, K, DEPENDENT)
    else:
        _read_rows(x, x_tiles, ready.index(NUM_GROUPS), DEPENDENT)
    b_first, b_rest = _multiply(x_tiles, weights, is_second, o_n, K, AT_ONCE, NUM_GROUPS)
    p_to = p_out
    stride = n
    if is_second:
        p_to = p_out if p_second_out is None else p_second_out
        stride = second_n
    _store(p_to, b_first, o_n, m, stride)
    if rest is not None:
        # The second weight has no rest.
        _store(p_to, b_rest, o_n + FIRST_N, gl.where(is_second, 0, m), stride)


@gluon.jit
def _read_rows(x, x_tiles, is_ready, DEPENDENT: gl.constexpr):
    """Waits for the rows, and until the copy engine has copied them."""
    NUM_TILES: gl.constexpr = x_tiles.shape[0] - BLOCK_M // x.block_type.shape[0] + 1
    wait_for_inputs(DEPENDENT)
    hopper.mbarrier.expect(is_ready, NUM_TILES * x.block_type.nbytes)
    for i in range(NUM_TILES):
        hopper.tma.async_copy_global_to_shared(x, [0, i * BLOCK_K], is_ready, x_tiles.index(i))
    hopper.mbarrier.wait(is_ready, 0)


@gluon.jit
def _multiply(
    x_tiles,
    weights,
    is_second,
    o_n,
    K: gl.constexpr,
    AT_ONCE: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
):
    """Products of rows and the first weights, and of rows and the rest where there is one. Refills
    the ring."""
    first, rest, _, first_tiles, rest_tiles, ready = weights
    ALL_GROUPS: gl.constexpr = K // BLOCK_K // AT_ONCE
    FIRST_N: gl.constexpr = first.block_type.shape[0]
    whole: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], gl.bfloat16)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST_N, 16])
    b_first = gl.full([BLOCK_M, FIRST_N], 0.0, gl.float32, mma)
    b_rest = b_first
    if rest is not None:
        REST_N: gl.constexpr = rest.block_type.shape[0]
        rest_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST_N, 16])
        b_rest = gl.full([BLOCK_M, REST_N], 0.0, gl.float32, rest_mma)
    for group in range(ALL_GROUPS):
        place = group % NUM_GROUPS
        hopper.mbarrier.wait(ready.index(place), group // NUM_GROUPS & 1)
        for j in gl.static_range(AT_ONCE):
            b_x = x_tiles.index(group * AT_ONCE + j)._reinterpret(
                gl.bfloat16, [BLOCK_M, BLOCK_K], whole
            )
            slot = place * AT_ONCE + j
            b_first = hopper.warpgroup_mma(
                b_x, first_tiles.index(slot).permute((1, 0)), b_first, is_async=True
            )
            if rest is not None:
                b_rest = hopper.warpgroup_mma(
                    b_x, rest_tiles.index(slot).permute((1, 0)), b_rest, is_async=True
                )
        # All but the last tile have been multiplied.
        if rest is not None:
            b_first, b_rest = hopper.warpgroup_mma_wait(2, deps=[b_first, b_rest])
        else:
            b_first = hopper.warpgroup_mma_wait(1, deps=[b_first])
        if (group > 0) & (group - 1 + NUM_GROUPS < ALL_GROUPS):
            gl.thread_barrier()
            _fill(weights, group - 1 + NUM_GROUPS, is_second, o_n, AT_ONCE, NUM_GROUPS)
    b_first = hopper.warpgroup_mma_wait(0, deps=[b_first])
    if rest is not None:
        b_rest = hopper.warpgroup_mma_wait(0, deps=[b_rest])
    return b_first, b_rest


@gluon.jit
def _fill(weights, group, is_second, o_n, AT_ONCE: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """Copies the tiles of a group into its place in the ring."""
    first, rest, second, first_tiles, rest_tiles, ready = weights
    place = group % NUM_GROUPS
    to = (ready.index(place), first_tiles, rest_tiles, place * AT_ONCE)
    o_k = group * AT_ONCE * BLOCK_K
    if second is None:
        _copy(first, rest, o_n, o_k, to, AT_ONCE)
    elif is_second:
        _copy(second, None, o_n, o_k, to, AT_ONCE)
    else:
        _copy(first, rest, o_n, o_k, to, AT_ONCE)


@gluon.jit
def _copy(first, rest, o_n, o_k, to, AT_ONCE: gl.constexpr):
    is_ready, first_tiles, rest_tiles, slot = to
    FIRST_N: gl.constexpr = first.block_type.shape[0]
    REST_BYTES: gl.constexpr = 0 if rest is None else rest.block_type.nbytes
    hopper.mbarrier.expect(is_ready, AT_ONCE * (first.block_type.nbytes + REST_BYTES))
    for j in range(AT_ONCE):
        where = [o_n, o_k + j * BLOCK_K]
        hopper.tma.async_copy_global_to_shared(first, where, is_ready, first_tiles.index(slot + j))
        if rest is not None:
            where = [o_n + FIRST_N, o_k + j * BLOCK_K]
            hopper.tma.async_copy_global_to_shared(
                rest, where, is_ready, rest_tiles.index(slot + j)
            )


@gluon.jit
def _store(p_out, b_acc, o_n, m, stride):
    COLUMNS: gl.constexpr = b_acc.shape[1]
    layout: gl.constexpr = b_acc.type.layout
    o_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))[:, None]
    o_column = o_n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    b_out = b_acc.to(p_out.dtype.element_ty)
    gl.store(p_out + o_row.to(gl.int64) * stride + o_column, b_out, mask=o_row < m)
