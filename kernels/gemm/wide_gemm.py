"""x @ weight.T for more rows than `skinny_gemm` serves, any N and K: one arithmetic, K never split,
the bits of `gemm`.

The copy engine reads and writes tiles of the product where rows begin at multiples of 16 bytes;
elsewhere a slower kernel does. Which tiles serve is a matter of speed alone (`wide_tiles`); on
Hopper some are `hopper_wide_gemm`'s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..attention import hopper_attention
from ..launch.device import num_multiprocessors
from .hopper_wide_gemm import hopper_wide_gemm
from .nearest import nearest
from .wide_tiles import GROUP, TeamTiles, WideTiles, choose_wide, fitting_tiles, place

NUM_WARPS = 4
UNALIGNED = WideTiles(64, 64, 3, 0.1, block_k=32)
"""Tiles for unaligned rows: addresses of single elements leave room for no more in registers."""


def wide_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: WideTiles | TeamTiles | None = None,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N], all of one dtype of two or
    four bytes. Tiles are chosen by shape where none are given, and are always the same where rows
    are unaligned."""
    m, k = x.shape
    n = weight.shape[0]
    assert x.dtype == weight.dtype == out.dtype
    assert out.shape == (m, n)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    if not all(map(_is_aligned, (x, weight, out))):
        _unaligned_gemm(x, weight, out)
        return
    multiprocessors = num_multiprocessors(x.device)
    tiles = tiles or choose_wide(
        m, n, k, x.dtype, multiprocessors, has_teams=hopper_attention.is_hopper(x.device)
    )
    if isinstance(tiles, TeamTiles):
        hopper_wide_gemm(x, weight, out, tiles, num_programs=multiprocessors)
        return
    block_k = tiles.block_k * 2 // x.element_size()
    _wide_gemm[(tiles.count(m, n),)](
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
        num_warps=NUM_WARPS,
    )


def tiles_for(weight: torch.Tensor) -> tuple[WideTiles | TeamTiles, ...]:
    """Tiles that products with weights like this one may take; the first ones are for very many
    rows."""
    return fitting_tiles(weight.dtype, has_teams=hopper_attention.is_hopper(weight.device))


def launch_all_tiles(weight: torch.Tensor) -> None:
    """Launches every kernel that products with weights like this one may take."""
    x = weight.new_zeros(1, weight.shape[1])
    for tiles in tiles_for(weight):
        wide_gemm(x, weight, weight.new_empty(1, len(weight)), tiles)


def _unaligned_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    _wide_gemm_unaligned[(UNALIGNED.count(*out.shape),)](
        *matrices(x, weight, out),
        BLOCK_M=UNALIGNED.block_m,
        BLOCK_N=UNALIGNED.block_n,
        BLOCK_K=UNALIGNED.block_k,
        GROUP=GROUP,
        num_warps=NUM_WARPS,
        num_stages=UNALIGNED.num_stages,
    )


def matrices(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor | int, ...]:
    """Arguments of kernels that find elements by strides: tensors, sizes M, N and K, and
    strides."""
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    return (
        x,
        weight,
        out,
        len(x),
        out.shape[1],
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        out.stride(0),
    )


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read it: each row begins at a multiple of 16 bytes."""
    return matrix.data_ptr() % 16 == matrix.stride(0) * matrix.element_size() % 16 == 0


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
    """Programs of one tile. Elements past the last row or column are read as zero and not
    written."""
    o_m, o_n = place(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i_k in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        b_x = nearest(x.load([o_m, i_k]))
        b_acc = tl.dot(b_x, tl.trans(nearest(weight.load([o_n, i_k]))), b_acc)
    out.store([o_m, o_n], b_acc.to(out.dtype))


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
    o_m, o_n = place(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP)
    o_m = o_m + tl.arange(0, BLOCK_M)[:, None]
    o_n = o_n + tl.arange(0, BLOCK_N)[:, None]
    o_k = tl.arange(0, BLOCK_K)[None, :]
    is_m = o_m < m
    is_n = o_n < n
    p_x += o_m.to(tl.int64) * stride_x + o_k
    p_w += o_n.to(tl.int64) * stride_w + o_k
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i_k in range(0, k, BLOCK_K):
        inside = i_k + o_k < k
        b_x = tl.load(p_x + i_k, mask=is_m & inside, other=0.0)
        b_w = tl.load(p_w + i_k, mask=is_n & inside, other=0.0)
        b_acc = tl.dot(nearest(b_x), tl.trans(nearest(b_w)), b_acc)
    p_out += o_m.to(tl.int64) * stride_out + tl.trans(o_n)
    tl.store(p_out, b_acc.to(p_out.dtype.element_ty), mask=is_m & tl.trans(is_n))
