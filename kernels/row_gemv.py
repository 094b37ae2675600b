"""Products of one row by multiply and add in float32, with what lies around them in a decoder's layer: the norm before,
a bias, SiLU·mul or the residual after. Their bits are not those of `gemm`: matrix units add in another order.

Latency is all. A program has whole rows of weights; dependent, it has them under way before it waits for the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headwater.kernels.dependent_launch import launch_options, release_dependents, wait_for_inputs
from headwater.kernels.rms_norm import rms_norm_twin
from headwater.kernels.silu_mul import gated, silu_mul_twin

WARP_WIDE = tl.constexpr(256)
"""Columns that a warp loads at once, 16 bytes a thread: tiles of this width give each warp rows of its own."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Weight rows a program, columns of them at once, and how many such columns it asks for before it waits."""

    block_n: int
    block_k: int
    num_early: int
    num_warps: int


# Measured on an H200 (docs/benchmarks.md, "One row"); the keys are the largest K served and whether there are gates.
TILES = {
    (1024, False): RowTiles(8, 1024, 1, 4),
    (1024, True): RowTiles(16, 1024, 1, 4),
    (2048, False): RowTiles(8, 256, 8, 4),
    (3072, False): RowTiles(4, 256, 12, 4),
    (4096, False): RowTiles(8, 4096, 1, 8),
    (4096, True): RowTiles(4, 4096, 1, 4),
    (12288, False): RowTiles(2, 4096, 3, 8),
}


def choose(k: int, *, is_gated: bool) -> RowTiles:
    """Of every larger K as of the largest."""
    fitting = [(most, tiles) for (most, gated), tiles in TILES.items() if gated == is_gated]
    return next((tiles for most, tiles in fitting if k <= most), fitting[-1][1])


def norm_gemv(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    dependent: bool = False,
) -> None:
    """x [K], norm [K], weight [N, K], bias [N] or None; writes out [N]: the product of x's RMS norm."""
    _launch(x, weight, out, norm=norm, eps=eps, bias=bias, dependent=dependent)


def norm_gemv_silu_mul(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    dependent: bool = False,
) -> None:
    """x [K], norm [K], weight [2 I, K], gates first; writes out [I]."""
    _launch(x, weight, out, norm=norm, eps=eps, is_gated=True, dependent=dependent)


def gemv_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    *,
    dependent: bool = False,
) -> None:
    """x [K], weight [N, K]; residual [N] += their product in place, rounded once."""
    _launch(x, weight, residual, adds=True, dependent=dependent)


def gemv_twin(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The bare product in plain torch, in float32 or better; not rounded."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return weight.to(dtype) @ x.to(dtype)


def norm_gemv_twin(x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    return gemv_twin(rms_norm_twin(x, norm, eps), weight)


def norm_gemv_silu_mul_twin(x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    return silu_mul_twin(norm_gemv_twin(x, norm, eps, weight))


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    adds: bool = False,
    dependent: bool,
) -> None:
    n, k = weight.shape
    assert x.shape == (k,)
    assert out.shape == (n // 2 if is_gated else n,)
    assert weight.is_contiguous()
    tiles = choose(k, is_gated=is_gated)
    # A program of gates has as many of what they gate.
    rows = tiles.block_n // 2 if is_gated else tiles.block_n
    _row_gemv[(triton.cdiv(len(out), rows),)](
        x,
        x if norm is None else norm,
        weight,
        x if bias is None else bias,
        out,
        len(out),
        eps,
        K=k,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        EARLY=min(tiles.num_early, triton.cdiv(k, tiles.block_k)),
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        GATED=is_gated,
        ADDS=adds,
        DEPENDENT=dependent,
        num_warps=tiles.num_warps,
        **launch_options(dependent),
    )


@triton.jit
def _columns(p_row, is_row, i: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The i-th BLOCK_K columns of rows p_row [N, 1]."""
    o_k = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    if (i + 1) * BLOCK_K <= K:
        return tl.load(p_row + o_k, mask=is_row, other=0.0)
    return tl.load(p_row + o_k, mask=is_row & (o_k < K), other=0.0)


@triton.jit
def _values(p_x, i: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The i-th BLOCK_K values of one row, as often as p_x [N, 1] names it."""
    o_k = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    if (i + 1) * BLOCK_K <= K:
        return tl.load(p_x + o_k)
    return tl.load(p_x + o_k, mask=o_k < K, other=0.0)


@triton.jit
def _row_gemv(
    p_x,
    p_norm,
    p_w,
    p_bias,
    p_out,
    n,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    ROWS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    release_dependents(DEPENDENT)
    first = tl.program_id(0) * ROWS
    o_n = first + tl.arange(0, ROWS)
    o_row = tl.arange(0, BLOCK_N)
    if GATED:
        # A gate and what it gates lie side by side.
        is_row = (first + o_row // 2 < n)[:, None]
        o_row = first + o_row // 2 + o_row % 2 * n
    else:
        o_row = first + o_row
        is_row = (o_row < n)[:, None]
    p_row = p_w + o_row.to(tl.int64)[:, None] * K
    # Where each warp has rows of its own, each loads the values for itself, and no sum has to cross warps.
    copies = tl.zeros((BLOCK_N if BLOCK_K == WARP_WIDE else 1, 1), tl.int32)
    p_x += copies
    p_norm += copies
    early = ()
    norms = ()
    for i in tl.static_range(EARLY):
        early += (_columns(p_row, is_row, i, K, BLOCK_K),)  # type: ignore[assignment]  # as long as Triton says
    if HAS_NORM:
        for i in tl.static_range(CHUNKS):
            norms += (_values(p_norm, i, K, BLOCK_K),)  # type: ignore[assignment]
    if HAS_BIAS:
        b_add = tl.load(p_bias + o_n, mask=o_n < n, other=0.0)

    wait_for_inputs(DEPENDENT)
    if ADDS:
        b_add = tl.load(p_out + o_n, mask=o_n < n, other=0.0)
    b_acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    b_square = tl.zeros((copies.shape[0], BLOCK_K), tl.float32)
    for i in tl.static_range(CHUNKS):
        b_x = _values(p_x, i, K, BLOCK_K).to(tl.float32)
        if HAS_NORM:
            b_square += b_x * b_x
            b_x *= norms[i].to(tl.float32)
        b_w = early[i] if i < EARLY else _columns(p_row, is_row, i, K, BLOCK_K)
        b_acc += b_w.to(tl.float32) * b_x
    b_y = tl.sum(b_acc, axis=1)
    if HAS_NORM:
        # The factor is common to all that is added.
        b_y *= tl.rsqrt(tl.sum(b_square, axis=1) / K + eps)
    if GATED:
        b_gate, b_up = tl.split(tl.reshape(b_y, (ROWS, 2)))
        b_y = gated(b_gate, b_up)
    if HAS_BIAS or ADDS:
        b_y += b_add.to(tl.float32)
    tl.store(p_out + o_n, b_y.to(p_out.dtype.element_ty), mask=o_n < n)
