"""x @ weight.T with gates, for many rows: SiLU of the first half of the product times the second,
neither of which is ever in memory. Persistent programs over tiles that the copy engine reads; one
has as many columns of gates as of what they gate, side by side in one product: that of `gemm`, to
the bit, rounded as if it were stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch.device import num_multiprocessors
from ..norm.silu_mul import gated


@dataclass(frozen=True, slots=True)
class GatedTiles:
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group: int = 8
    """Number of consecutive tiles of rows that use the same weights."""
    num_stages: int = 3
    num_warps: int = 8
    flatten: bool = True
    """Whether the next tile's copies begin while this one is gated."""


TILES = GatedTiles()
MIN_ROWS = 512
MIN_TILES = 264
"""Least numbers of rows and of tiles. Below them the chip is full for too short a time: cuBLASLt
and a second launch are as fast."""


def is_gated_at_once(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `gated_gemm` makes the product of these faster."""
    m = x.shape[0]
    n = weight.shape[0] // 2
    is_large = m >= MIN_ROWS and triton.cdiv(m, TILES.block_m) * (n // TILES.block_n) >= MIN_TILES
    return is_large and _fits(x, weight, TILES)


def _fits(x: torch.Tensor, weight: torch.Tensor, tiles: GatedTiles) -> bool:
    """Whether the shapes are whole tiles but for the rows."""
    k = x.shape[1]
    n = weight.shape[0] // 2
    return (
        n % tiles.block_n == 0
        and k % tiles.block_k == 0
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def gated_gemm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tiles: GatedTiles = TILES
) -> None:
    """Writes the gated product of x [M, K] and weight [2 I, K], gates first, to out [M, I], all of
    them contiguous."""
    assert _fits(x, weight, tiles)
    assert out.is_contiguous()
    m, k = x.shape
    n = out.shape[1]
    num_tiles = triton.cdiv(m, tiles.block_m) * (n // tiles.block_n)
    _gated_gemm[(min(num_tiles, num_multiprocessors(x.device)),)](
        TensorDescriptor.from_tensor(x, [tiles.block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(weight.view(2, n, k), [2, tiles.block_n, tiles.block_k]),
        TensorDescriptor.from_tensor(out, [tiles.block_m, tiles.block_n]),
        m,
        n,
        k,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP=tiles.group,
        STAGES=tiles.num_stages,
        FLATTEN=tiles.flatten,
        num_warps=tiles.num_warps,
    )


@triton.jit(do_not_specialize=["m"])
def _gated_gemm(
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
    FLATTEN: tl.constexpr,
):
    num_m = tl.cdiv(m, BLOCK_M)
    num_n = n // BLOCK_N
    in_group = GROUP * num_n
    for i_tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        first_m = i_tile // in_group * GROUP
        rows = tl.minimum(num_m - first_m, GROUP)
        o_m = (first_m + i_tile % in_group % rows) * BLOCK_M
        o_n = i_tile % in_group // rows * BLOCK_N
        b_acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for i_k in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            b_weight = tl.reshape(weight.load([0, o_n, i_k]), (2 * BLOCK_N, BLOCK_K))
            b_acc = tl.dot(x.load([o_m, i_k]), tl.trans(b_weight), b_acc)
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        dtype: tl.constexpr = out.dtype
        b_out = gated(b_gate.to(dtype).to(tl.float32), b_up.to(dtype).to(tl.float32))
        out.store([o_m, o_n], b_out.to(dtype))
