"""x @ weight.T with weights of four bits: the bits of `gemm` over the expanded matrix, for any
number of rows.

Up to `MOST_ROWS` rows weights become numbers in registers, each rounded as `int4_layout.expand`
rounds it, on their way to the matrix unit, where they are the operand with the many rows; K is
never split and its order is that of `gemm`. More rows are worth a matrix: it is expanded into
scratch memory and left to `gemm`. On Hopper `hopper_packed_gemm` multiplies bfloat16 rows by
weights whose groups follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from ..quant.int4_layout import Int4Weight, depth
from . import gemm, hopper_packed_gemm, packed_tiles, packed_words
from .packed_words import PackedWords

MOST_ROWS = 256
"""Number of rows above which writing a matrix and reading it again costs less than unpacking it in
each program."""
DTYPES = (torch.bfloat16, torch.float16)
"""Types whose products unpack weights in registers; products of other types read the expanded
matrix."""


@dataclass(frozen=True, slots=True)
class Int4Tiles:
    """Shape of a product; `int4_layout.depth` is the part of K that is read at a time."""

    block_m: int
    num_stages: int


# Keys are the largest numbers of rows.
TILES = {
    16: Int4Tiles(16, 9),
    32: Int4Tiles(32, 7),
    64: Int4Tiles(64, 5),
    MOST_ROWS: Int4Tiles(128, 4),
}
BLOCK_N = 64
NUM_WARPS = 4
"""Outputs of a program, and its warps: the matrix unit takes 16 outputs of each warp."""


def choose(num_rows: int, dtype: torch.dtype) -> Int4Tiles | None:
    """The tiles for a product; None: the matrix is expanded."""
    if dtype not in DTYPES:
        return None
    return next((tiles for most, tiles in TILES.items() if num_rows <= most), None)


def int4_linear(x: torch.Tensor, weight: Int4Weight, *, dependent: bool = False) -> torch.Tensor:
    """x [M, K] times weight [N, K]: [M, N] in x's dtype, accumulated in float32."""
    if (packed := _packed(x, weight)) is not None and (
        ring := packed_tiles.choose(x.shape[0], *packed.shape, packed.bits)
    ) is not None:
        out = x.new_empty(x.shape[0], weight.shape[0])
        hopper_packed_gemm.hopper_packed_gemm(x, packed, out, ring, dependent=dependent)
        return out
    tiles = choose(x.shape[0], x.dtype)
    if tiles is None:
        return gemm.linear(x, expanded(weight, x.dtype), dependent=dependent, is_own=True)
    int4_gemm(
        x, weight, out := x.new_empty(x.shape[0], weight.shape[0]), tiles, dependent=dependent
    )
    return out


def _packed(x: torch.Tensor, weight: Int4Weight) -> PackedWords | None:
    """The weight as the kernel for Hopper reads it; None: that kernel does not multiply x by it."""
    is_served = weight.groups is None and hopper_packed_gemm.serves(x)
    if not (is_served and packed_words.fits(weight.shape, len(weight.scales), bits=4)):
        return None
    return PackedWords(words=weight.words, scales=weight.scales, zeros=weight.zeros, bits=4)


def int4_gemm(
    x: torch.Tensor,
    weight: Int4Weight,
    out: torch.Tensor,
    tiles: Int4Tiles,
    *,
    dependent: bool = False,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N]."""
    m, (n, k) = x.shape[0], weight.shape
    assert x.dtype == out.dtype
    assert x.stride(1) == out.stride(1) == 1
    assert weight.words.is_contiguous()
    assert weight.scales.is_contiguous()
    assert weight.zeros is None or weight.zeros.is_contiguous()
    grid = (triton.cdiv(n, BLOCK_N), triton.cdiv(m, tiles.block_m))
    _int4_gemm[grid](
        x,
        weight.words,
        weight.scales,
        weight.zeros,
        weight.groups,
        out,
        m,
        n,
        k,
        x.stride(0),
        weight.words.stride(0),
        out.stride(0),
        weight.group_size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=(block_k := depth(k)),
        IN_ORDER=weight.groups is None,
        ONE_GROUP=weight.groups is None and weight.group_size % block_k == 0,
        DEPENDENT=dependent,
        num_warps=NUM_WARPS,
        num_stages=tiles.num_stages,
        **launch_options(dependent),
    )


def expanded(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """`int4_layout.expand` in one launch."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.words.device)
    block_k = depth(k)
    _expand_int4[(triton.cdiv(n, BLOCK_N), k // block_k)](
        weight.words,
        weight.scales,
        weight.zeros,
        weight.groups,
        out,
        n,
        k,
        weight.group_size,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        IN_ORDER=weight.groups is None,
        ONE_GROUP=weight.groups is None and weight.group_size % block_k == 0,
        num_warps=NUM_WARPS,
    )
    return out


@triton.jit
def unpack(b_words, NIBBLE: tl.constexpr):
    """A nibble of each word as float32, plus 128 or, of an odd one, 2048: it is put where their
    mantissas end, so that a word is shifted four times for eight nibbles."""
    IS_ODD: tl.constexpr = NIBBLE % 2
    SHIFT: tl.constexpr = (12 if IS_ODD else 16) - 4 * NIBBLE
    b_bits = b_words << SHIFT if SHIFT >= 0 else b_words >> -SHIFT
    b_bits = (b_bits & 0xF000) | 0x45000000 if IS_ODD else (b_bits & 0xF0000) | 0x43000000
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(
    b_words, b_scale, b_zero, dtype: tl.constexpr, SCALED: tl.constexpr, NIBBLE: tl.constexpr
):
    """(nibble - zero) * scale, rounded; or the nibble as float32. Nothing else is rounded: the sums
    and products have at most 23 bits, and float32 holds all of the last product."""
    OFFSET: tl.constexpr = 2048.0 if NIBBLE % 2 else 128.0
    b_values = unpack(b_words, NIBBLE)
    return (
        tl.fma(b_values, b_scale, -(b_zero + OFFSET) * b_scale).to(dtype)
        if SCALED
        else b_values - OFFSET
    )


@triton.jit
def _pair(b_words, b_scale, b_zero, dtype: tl.constexpr, SCALED: tl.constexpr, P: tl.constexpr):
    return tl.join(
        _weight(b_words, b_scale, b_zero, dtype, SCALED, P),
        _weight(b_words, b_scale, b_zero, dtype, SCALED, P + 4),
    )


@triton.jit
def unpack_tile(b_words, b_scale, b_zero, dtype: tl.constexpr, IN_ORDER: tl.constexpr):
    """Converts int32 [N, K / 8] to weights [N, K] in the order of `int4_layout`; scales and zero
    points as in `load_groups`."""
    BLOCKS: tl.constexpr = b_words.shape[1] // 4
    b_words = tl.reshape(b_words, (b_words.shape[0], 4, BLOCKS))
    b_s, b_z = (b_scale[:, None, :], b_zero[:, None, :]) if IN_ORDER else (b_scale, b_zero)
    b_01 = tl.join(
        _pair(b_words, b_s, b_z, dtype, IN_ORDER, 0),
        _pair(b_words, b_s, b_z, dtype, IN_ORDER, 1),
    )
    b_23 = tl.join(
        _pair(b_words, b_s, b_z, dtype, IN_ORDER, 2),
        _pair(b_words, b_s, b_z, dtype, IN_ORDER, 3),
    )
    # [N, words, blocks, halves of a pair, pairs by bit 0, pairs by bit 1]
    b_pairs = tl.permute(tl.join(b_01, b_23), (0, 2, 5, 4, 1, 3))
    b_values = tl.reshape(b_pairs, (b_words.shape[0], BLOCKS * 32))
    return b_values if IN_ORDER else ((b_values - b_zero) * b_scale).to(dtype)


@triton.jit
def rows_of_threads(BLOCK_N: tl.constexpr):
    """Places [N] among the outputs of a program in the order in which threads load them, so that
    each thread has those that the matrix unit takes from it; see `in_order`. Of 64, bits 3 to 5 are
    turned."""
    o_n = tl.arange(0, BLOCK_N)
    return (o_n & 7) | (o_n >> 5) << 3 | (o_n >> 3 & 3) << 4


@triton.jit
def in_order(b_rows):
    """Converts [N, K] with rows as in `rows_of_threads` to rows in their order. Moves nothing
    between threads."""
    b_turned = tl.permute(tl.reshape(b_rows, (2, 4, 8, b_rows.shape[1])), (1, 0, 2, 3))
    return tl.reshape(b_turned, (b_rows.shape[0], b_rows.shape[1]))


@triton.jit
def load_groups(
    p_scales, p_zeros, p_groups, i_k, o_n, is_n, n, group_size,
    BLOCK_K: tl.constexpr, IN_ORDER: tl.constexpr, ONE_GROUP: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of outputs o_n [N, 1] and BLOCK_K inputs from i_k on: float32 [N, 1]
    of all of them, of each block of 32, or, where groups do not follow one another, of each input.
    p_zeros None: symmetric weights."""
    if IN_ORDER and ONE_GROUP:
        o_group = i_k // group_size * n + o_n
    elif IN_ORDER:
        o_group = (i_k + 32 * tl.arange(0, BLOCK_K // 32)[None, :]) // group_size * n + o_n
    else:
        o_group = tl.load(p_groups + i_k + tl.arange(0, BLOCK_K))[None, :] * n + o_n
    b_scale = tl.load(p_scales + o_group, mask=is_n, other=0.0).to(tl.float32)
    if p_zeros is None:
        b_zero = tl.full(b_scale.shape, 8.0, tl.float32)
    else:
        b_zero = tl.load(p_zeros + o_group, mask=is_n, other=0).to(tl.float32)
    return b_scale, b_zero


# Two kernels: one for a single row, which needs no masks, and one for all other numbers of rows.
@triton.jit(do_not_specialize_on_alignment=["m"])
def _int4_gemm(
    p_x,
    p_words,
    p_scales,
    p_zeros,
    p_groups,
    p_out,
    m,
    n,
    k,
    stride_x,
    stride_words,
    stride_out,
    group_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    o_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    o_n = (tl.program_id(0) * BLOCK_N + rows_of_threads(BLOCK_N))[:, None]
    is_m = o_m < m
    is_n = o_n < n
    o_k = tl.arange(0, BLOCK_K)[None, :]
    release_dependents(DEPENDENT)
    p_words += o_n.to(tl.int64) * stride_words + tl.arange(0, BLOCK_K // 8)[None, :]
    p_x += o_m * stride_x + o_k
    dtype: tl.constexpr = p_x.dtype.element_ty
    b_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    b_scale, b_zero = load_groups(
        p_scales, p_zeros, p_groups, 0, o_n, is_n, n, group_size, BLOCK_K, IN_ORDER, ONE_GROUP
    )
    wait_for_inputs(DEPENDENT)
    for i_k in range(0, k, BLOCK_K):
        b_words = tl.load(p_words + i_k // BLOCK_K * (BLOCK_K // 8), mask=is_n, other=0)
        b_x = tl.load(p_x + i_k, mask=is_m, other=0.0)
        # Scales of the next tile, which are too narrow for the copies that fill stages.
        i_next = tl.minimum(i_k + BLOCK_K, k - BLOCK_K)
        b_next_scale, b_next_zero = load_groups(
            p_scales,
            p_zeros,
            p_groups,
            i_next,
            o_n,
            is_n,
            n,
            group_size,
            BLOCK_K,
            IN_ORDER,
            ONE_GROUP,
        )
        b_weight = in_order(unpack_tile(b_words, b_scale, b_zero, dtype, IN_ORDER))
        b_acc = tl.dot(b_weight, tl.trans(b_x), b_acc)
        b_scale = b_next_scale
        b_zero = b_next_zero
    o_out = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    tl.store(
        p_out + tl.trans(o_m) * stride_out + o_out,
        b_acc.to(dtype),
        mask=tl.trans(is_m) & (o_out < n),
    )


@triton.jit
def _expand_int4(
    p_words,
    p_scales,
    p_zeros,
    p_groups,
    p_out,
    n,
    k,
    group_size,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
    ONE_GROUP: tl.constexpr,
):
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    is_n = o_n < n
    i_k = tl.program_id(1) * BLOCK_K
    b_words = tl.load(
        p_words + o_n.to(tl.int64) * (k // 8) + i_k // 8 + tl.arange(0, BLOCK_K // 8)[None, :],
        mask=is_n,
        other=0,
    )
    b_scale, b_zero = load_groups(
        p_scales, p_zeros, p_groups, i_k, o_n, is_n, n, group_size, BLOCK_K, IN_ORDER, ONE_GROUP
    )
    b_out = unpack_tile(b_words, b_scale, b_zero, p_out.dtype.element_ty, IN_ORDER)
    tl.store(p_out + o_n.to(tl.int64) * k + i_k + tl.arange(0, BLOCK_K)[None, :], b_out, mask=is_n)
