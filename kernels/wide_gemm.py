"""x @ weight.T for more rows than `skinny_gemm` serves, any N and K: one arithmetic, K never split, the bits of `gemm`.

Persistent programs over tiles of the product, which the copy engine reads and writes, where rows begin at multiples of
16 bytes; elsewhere a slower program for each tile. Which tiles serve is a matter of speed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.kernels.device import num_multiprocessors


@dataclass(frozen=True, slots=True)
class WideTiles:
    block_m: int
    block_n: int
    block_k: int
    """Of elements of two bytes; half as many of four."""
    num_warps: int
    num_stages: int
    rate: float
    """Products in a unit of time by a program that has a multiprocessor to itself; of the largest tile 1."""

    def time(self, m: int, n: int, num_programs: int) -> float:
        """Of [m, K] x [n, K], in units of K: rounds of programs that each make one tile at a time."""
        return -(-self.count(m, n) // num_programs) * self.block_m * self.block_n / self.rate

    def count(self, m: int, n: int) -> int:
        """Number of tiles of a product [m, n]."""
        return -(-m // self.block_m) * -(-n // self.block_n)


TILES = (
    WideTiles(128, 256, 64, 8, 3, 1.0),
    WideTiles(128, 128, 64, 8, 4, 0.85),
    WideTiles(128, 64, 128, 4, 4, 0.6),
    WideTiles(64, 128, 64, 4, 6, 0.55),
    WideTiles(64, 64, 128, 4, 5, 0.4),
    WideTiles(64, 32, 128, 4, 6, 0.25),
)
"""The largest first. Rates are estimates; `headwater.bench.gpu_kernels --only products` times every tile."""
MANY_ROWS = 2048
"""With more the chip is full whatever the tile: the largest serves, so that steps of any size launch one kernel."""
GROUP = 8
"""Tiles of rows that follow one another over the same weights, which stay in the second-level cache."""
UNALIGNED = WideTiles(64, 64, 32, 4, 3, 0.1)
"""Addresses of single elements leave room for no more in registers."""


def fitting_tiles(dtype: torch.dtype) -> tuple[WideTiles, ...]:
    """Those whose stages and product fit into shared memory."""
    return TILES if dtype.itemsize == 2 else TILES[1:]


def choose_wide(m: int, n: int, dtype: torch.dtype, num_programs: int) -> WideTiles:
    """The tiles that take the least time for [m, K] x [n, K] on so many multiprocessors."""
    tiles = fitting_tiles(dtype)
    return tiles[0] if m > MANY_ROWS else min(tiles, key=lambda tile: tile.time(m, n, num_programs))


def wide_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tiles: WideTiles | None = None) -> None:
    """x [M, K], weight [N, K]; writes out [M, N], all of one dtype of two or four bytes. Tiles are chosen by shape
    where none are given, and are always the same where rows are unaligned."""
    m, k = x.shape
    n = weight.shape[0]
    assert x.dtype == weight.dtype == out.dtype
    assert out.shape == (m, n)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    if not all(map(_is_aligned, (x, weight, out))):
        _unaligned_gemm(x, weight, out)
        return
    num_programs = num_multiprocessors(x.device)
    tiles = tiles or choose_wide(m, n, x.dtype, num_programs)
    block_k = tiles.block_k * 2 // x.element_size()
    _wide_gemm[(min(tiles.count(m, n), num_programs),)](
        TensorDescriptor.from_tensor(x, [tiles.block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [tiles.block_n, block_k]),
        TensorDescriptor.from_tensor(out, [tiles.block_m, tiles.block_n]),
        m,
        n,
        k,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=block_k,
        GROUP=GROUP,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


def launch_all_tiles(weight: torch.Tensor) -> None:
    """Launches every kernel that products with weights like this one may take."""
    x = weight.new_zeros(1, weight.shape[1])
    for tiles in fitting_tiles(weight.dtype):
        wide_gemm(x, weight, weight.new_empty(1, len(weight)), tiles)


def _unaligned_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    m, n = out.shape
    _wide_gemm_unaligned[(UNALIGNED.count(m, n),)](
        x,
        weight,
        out,
        m,
        n,
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        BLOCK_M=UNALIGNED.block_m,
        BLOCK_N=UNALIGNED.block_n,
        BLOCK_K=UNALIGNED.block_k,
        GROUP=GROUP,
        num_warps=UNALIGNED.num_warps,
        num_stages=UNALIGNED.num_stages,
    )


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read it: each row begins at a multiple of 16 bytes."""
    return matrix.data_ptr() % 16 == matrix.stride(0) * matrix.element_size() % 16 == 0


@triton.jit
def _place(i_tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of a tile."""
    num_m, num_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    in_group = GROUP * num_n
    first_m = i_tile // in_group * GROUP
    rows = tl.minimum(num_m - first_m, GROUP)
    return (first_m + i_tile % in_group % rows) * BLOCK_M, i_tile % in_group // rows * BLOCK_N


@triton.jit(do_not_specialize=["m"])
def _wide_gemm(
    x,
    weight,
    out,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    num_tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    # Flattened: the next tile's copies begin while this one is stored.
    for i_tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        o_m, o_n = _place(i_tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # What lies past the last row or column is read as zero and not written.
        for i_k in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            b_acc = tl.dot(x.load([o_m, i_k]), tl.trans(weight.load([o_n, i_k])), b_acc)
        dtype: tl.constexpr = out.dtype
        out.store([o_m, o_n], b_acc.to(dtype))


@triton.jit(do_not_specialize=["m"])
def _wide_gemm_unaligned(
    p_x,
    p_w,
    p_out,
    m,
    n,
    k,
    stride_x,
    stride_w,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    o_m, o_n = _place(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP)
    o_m, o_n = o_m + tl.arange(0, BLOCK_M)[:, None], o_n + tl.arange(0, BLOCK_N)[:, None]
    o_k = tl.arange(0, BLOCK_K)[None, :]
    is_m, is_n = o_m < m, o_n < n
    p_x += o_m.to(tl.int64) * stride_x + o_k
    p_w += o_n.to(tl.int64) * stride_w + o_k
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i_k in range(0, k, BLOCK_K):
        inside = i_k + o_k < k
        b_x = tl.load(p_x + i_k, mask=is_m & inside, other=0.0)
        b_w = tl.load(p_w + i_k, mask=is_n & inside, other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc)
    p_out += o_m.to(tl.int64) * stride_out + tl.trans(o_n)
    tl.store(p_out, b_acc.to(p_out.dtype.element_ty), mask=is_m & tl.trans(is_n))
