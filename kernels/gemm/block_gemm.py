"""x @ weight.T with weights in GGUF's block formats: the bits of `gemm` over the expanded matrix,
for any rows.

Up to `int4_gemm.MOST_ROWS` rows weights become numbers in registers on their way to the matrix
unit, where they are the operand with the many rows; K is never split and its order is that of
`gemm`. More rows are worth a matrix: it is expanded into scratch memory and left to `gemm`, if it
is not too large. On Hopper `hopper_block_gemm` multiplies bfloat16 rows. Outputs of several parts
follow one another, each part in a format of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from ..quant.block_planes import BlockPlanes
from ..quant.int4_layout import depth
from . import gemm, hopper_block_gemm, hopper_packed_gemm, packed_tiles
from .block_unpacking import constants, expanded_rows, load_high, load_scales, unpack_blocks
from .block_unpacking import expanded as expand_into
from .int4_gemm import (
    BLOCK_N,
    DTYPES,
    MOST_ROWS,
    NUM_WARPS,
    TILES,
    Int4Tiles,
    choose,
    in_order,
    rows_of_threads,
)
from .packed_tiles import MOST_ROWS_OF_ONE

Parts = Sequence[BlockPlanes]
MOST_SCRATCH = 768 << 20
"""Bytes of the largest matrix that is expanded: a vocabulary head is larger, and seldom has many
rows."""


def block_linear(x: torch.Tensor, parts: Parts, *, dependent: bool = False) -> torch.Tensor:
    """x [M, K] times parts [N_i, K]: [M, N] in x's dtype, accumulated in float32."""
    multiply = [_kernel_for(x, part, dependent=dependent) for part in parts]
    if None in multiply:
        if x.dtype in DTYPES and not is_expanded(parts, x.dtype):
            return torch.cat([block_linear(some, parts) for some in x.split(MOST_ROWS)])
        return gemm.linear(x, expanded(parts, x.dtype), dependent=dependent, is_own=True)
    out = x.new_empty(x.shape[0], num_outputs(parts))
    first = 0
    for part, each in zip(parts, multiply, strict=True):
        assert each is not None
        each(out[:, first : first + part.shape[0]])
        first += part.shape[0]
    return out


def _kernel_for(
    x: torch.Tensor, weight: BlockPlanes, *, dependent: bool
) -> Callable[[torch.Tensor], None] | None:
    """Writes the product of x and a weight to a matrix; None: a matrix that is expanded first takes
    less time."""
    if hopper_packed_gemm.serves(x) and hopper_block_gemm.fits(weight):
        ring = hopper_block_gemm.choose(x.shape[0], weight)
        if ring is None:
            return None
        return lambda out: hopper_block_gemm.hopper_block_gemm(
            x, weight, out, ring, dependent=dependent
        )
    tiles = choose(x.shape[0], x.dtype)
    return (
        None
        if tiles is None
        else lambda out: block_gemm(x, weight, out, tiles, dependent=dependent)
    )


def is_expanded(parts: Parts, dtype: torch.dtype) -> bool:
    """Whether many rows are multiplied by the expanded matrix. Those of a larger one are multiplied
    in pieces."""
    return num_outputs(parts) * parts[0].shape[1] * dtype.itemsize <= MOST_SCRATCH


def num_outputs(parts: Parts) -> int:
    return sum(part.shape[0] for part in parts)


def expanded(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K], each rounded to the dtype once, in a launch a part."""
    out = torch.empty(
        num_outputs(parts), parts[0].shape[1], dtype=dtype, device=parts[0].words.device
    )
    first = 0
    for part in parts:
        expand_into(part, out[first : first + part.shape[0]])
        first += part.shape[0]
    return out


def rows_of(planes: BlockPlanes, row_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [T, K] of weights at row_ids, integers [T], in one launch."""
    out = torch.empty(len(row_ids), planes.shape[1], dtype=dtype, device=planes.words.device)
    expanded_rows(planes, row_ids, out)
    return out


def launch_all_tiles(parts: Parts, dtype: torch.dtype, early_rows: int) -> None:
    """Launches every kernel that products with these parts may need; those of up to `early_rows`
    rows start while the kernel before them ends."""
    device = parts[0].words.device
    k = parts[0].shape[1]
    of_rings = {MOST_ROWS_OF_ONE, *(rows for _, rows in packed_tiles.TILES)}
    for num_rows in sorted({1, *TILES, *of_rings}):
        x = torch.zeros(num_rows, k, dtype=dtype, device=device)
        block_linear(x, parts, dependent=num_rows <= early_rows)
    if is_expanded(parts, dtype):
        expanded(parts, dtype)
    else:
        block_linear(torch.zeros(MOST_ROWS, k, dtype=dtype, device=device), parts)


def block_gemm(
    x: torch.Tensor,
    weight: BlockPlanes,
    out: torch.Tensor,
    tiles: Int4Tiles,
    *,
    dependent: bool = False,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N], whose rows may be parts of
    longer ones."""
    m, (n, k) = x.shape[0], weight.shape
    assert x.dtype == out.dtype
    assert x.stride(1) == out.stride(1) == 1
    stages = tiles.num_stages - (weight.format.bits == 8)
    _block_gemm[(triton.cdiv(n, BLOCK_N), triton.cdiv(m, tiles.block_m))](
        x,
        weight.words,
        weight.high,
        weight.scales,
        weight.factors,
        out,
        m,
        n,
        k,
        x.stride(0),
        weight.words.stride(0),
        out.stride(0),
        **constants(weight.format),
        BLOCK_M=tiles.block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=depth(k),
        DEPENDENT=dependent,
        num_warps=NUM_WARPS,
        num_stages=stages,
        **launch_options(dependent),
    )


# Two kernels: one for a single row, which needs no masks, and one for all other numbers of rows.
@triton.jit(do_not_specialize_on_alignment=["m"])
def _block_gemm(
    p_x,
    p_words,
    p_high,
    p_scales,
    p_factors,
    p_out,
    m,
    n,
    k,
    stride_x,
    stride_words,
    stride_out,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    MIN_SIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    WORD: tl.constexpr = 4 if BITS == 8 else 8
    WORDS: tl.constexpr = BLOCK_K // WORD
    o_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    o_n = (tl.program_id(0) * BLOCK_N + rows_of_threads(BLOCK_N))[:, None]
    is_m = o_m < m
    is_n = o_n < n
    release_dependents(DEPENDENT)
    p_words += o_n.to(tl.int64) * stride_words + tl.arange(0, WORDS)[None, :]
    p_x += o_m * stride_x + tl.arange(0, BLOCK_K)[None, :]
    dtype: tl.constexpr = p_x.dtype.element_ty
    b_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    b_first, b_last, b_added = load_scales(p_scales, p_factors, 0, o_n, k, UNIT, MIN_SIGN, BLOCK_K)
    wait_for_inputs(DEPENDENT)
    for i_k in range(0, k, BLOCK_K):
        b_words = tl.load(p_words + i_k // BLOCK_K * WORDS, mask=is_n, other=0)
        b_high = b_words if p_high is None else load_high(p_high, i_k, o_n, is_n, n, k, 0, BLOCK_K)
        b_upper = load_high(p_high, i_k, o_n, is_n, n, k, 1, BLOCK_K) if BITS == 6 else b_words
        b_x = tl.load(p_x + i_k, mask=is_m, other=0.0)
        # Scales of the next tile, which are too narrow for the copies that fill stages.
        i_next = tl.minimum(i_k + BLOCK_K, k - BLOCK_K)
        b_next_first, b_next_last, b_next_added = load_scales(
            p_scales, p_factors, i_next, o_n, k, UNIT, MIN_SIGN, BLOCK_K
        )
        b_weight = in_order(
            unpack_blocks(b_words, b_high, b_upper, b_first, b_last, b_added, dtype, BITS, OFFSET)
        )
        b_acc = tl.dot(b_weight, tl.trans(b_x), b_acc)
        b_first = b_next_first
        b_last = b_next_last
        b_added = b_next_added
    o_out = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    tl.store(
        p_out + tl.trans(o_m) * stride_out + o_out,
        b_acc.to(dtype),
        mask=tl.trans(is_m) & (o_out < n),
    )
