"""Numbers in GGUF's block formats as weights in registers: one launch for a matrix, or for some of
its rows.

A weight is (q - offset) * scale, or q * scale plus or minus a minimum, rounded to the dtype as
`block_planes.expand` rounds it: products of numbers and scales have at most 24 bits, so that
float32 holds them as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quant.block_formats import BlockFormat
from ..quant.block_planes import BlockPlanes
from ..quant.int4_layout import depth
from .int4_gemm import unpack

ROWS_OF_PROGRAM = 16
NUM_WARPS = 4


def constants(format: BlockFormat) -> dict[str, int]:
    """Arguments of kernels that tell formats apart."""
    return {
        "BITS": format.bits,
        "OFFSET": format.offset,
        "UNIT": format.unit,
        "MIN_SIGN": 0 if not format.has_min else -1 if format.is_nested else 1,
    }


def expanded(planes: BlockPlanes, out: torch.Tensor) -> None:
    """Writes the weights [N, K], each rounded to the dtype of out once."""
    _expand_rows(planes, None, out)


def expanded_rows(planes: BlockPlanes, row_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Writes rows at row_ids, integers [T], to out [T, K], rounded as `expanded` rounds them."""
    _expand_rows(planes, row_ids.contiguous(), out)


def _expand_rows(planes: BlockPlanes, row_ids: torch.Tensor | None, out: torch.Tensor) -> None:
    (n, k), num_rows = planes.shape, len(out)
    assert out.is_contiguous()
    assert out.shape == (n if row_ids is None else len(row_ids), k)
    if num_rows == 0:
        return
    _expand_blocks[(triton.cdiv(num_rows, ROWS_OF_PROGRAM), k // (block_k := depth(k)))](
        planes.words,
        planes.high,
        planes.scales,
        planes.factors,
        row_ids,
        out,
        num_rows,
        n,
        k,
        **constants(planes.format),
        BLOCK_N=ROWS_OF_PROGRAM,
        BLOCK_K=block_k,
        num_warps=NUM_WARPS,
    )


@triton.jit
def load_scales(
    p_scales, p_factors, i_k, o_n, k, UNIT: tl.constexpr, MIN_SIGN: tl.constexpr,
    BLOCK_K: tl.constexpr
):  # fmt: skip
    """Scales of the first and of the last 16 inputs of each block of 32, and what is added to its
    weights: float32 [N, blocks], of outputs o_n [N, 1] and BLOCK_K inputs from i_k on."""
    PLANES: tl.constexpr = 1 if MIN_SIGN == 0 else 2
    o_block = i_k // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
    o_unit = (o_n // 64 * (k // UNIT) + (i_k // UNIT if UNIT > 32 else o_block)) * (
        PLANES * 64
    ) + o_n % 64
    b_first = tl.load(p_scales + o_unit).to(tl.float32)
    b_added = (
        tl.zeros_like(b_first)
        if MIN_SIGN == 0
        else MIN_SIGN * tl.load(p_scales + o_unit + 64).to(tl.float32)
    )
    b_last = b_first
    if UNIT > 32:
        o_factor = (o_n // 64 * (k // 32) + o_block) * 128 + o_n % 64
        b_factor = tl.load(p_factors + o_factor).to(tl.float32)
        b_other = tl.load(p_factors + o_factor + 64).to(tl.float32)
        b_last = b_first * (b_other if MIN_SIGN == 0 else b_factor)
        b_first *= b_factor
        b_added = b_added * b_other if MIN_SIGN != 0 else tl.zeros_like(b_first)
    return b_first, b_last, b_added


@triton.jit
def load_high(p_high, i_k, o_n, is_n, n, k, PLANE: tl.constexpr, BLOCK_K: tl.constexpr):
    """A bit above four of the weights of outputs o_n [N, 1] and BLOCK_K inputs from i_k on, int32
    [N, 4]."""
    o_tile = ((PLANE * tl.cdiv(n, 64) + o_n // 64) * (k // BLOCK_K) + i_k // BLOCK_K).to(
        tl.int64
    ) * 256
    return tl.load(
        p_high + o_tile + o_n % 64 * 4 + tl.arange(0, 4)[None, :], mask=is_n, other=0
    ).to(tl.int32)


@triton.jit
def unpack_blocks(
    b_words, b_high, b_upper, b_first, b_last, b_added, dtype: tl.constexpr, BITS: tl.constexpr,
    OFFSET: tl.constexpr
):  # fmt: skip
    """Converts words [N, words] to weights [N, K]; the fifth and the sixth bits as of `load_high`,
    scales as of `load_scales`."""
    if BITS == 8:
        b_values = _bytes_in_order(b_words).to(tl.float32) - OFFSET
        b_values = tl.reshape(b_values, (b_words.shape[0], b_first.shape[1], 32))
        b_weight = (b_values * b_first[:, :, None]).to(dtype)
        return tl.reshape(b_weight, (b_words.shape[0], b_words.shape[1] * 4))
    else:
        BLOCKS: tl.constexpr = b_words.shape[1] // 4
        b_w = tl.reshape(b_words, (b_words.shape[0], 4, BLOCKS))
        o_bit = 4 * tl.arange(0, BLOCKS)[None, None, :]
        b_h = b_high[:, :, None] >> o_bit if BITS > 4 else b_w
        b_u = b_upper[:, :, None] >> o_bit if BITS > 5 else b_w
        b_0 = b_first[:, None, :]
        b_1 = b_last[:, None, :]
        b_a = b_added[:, None, :]
        b_01 = tl.join(
            _pair(b_w, b_h, b_u, b_0, b_a, dtype, BITS, OFFSET, 0),
            _pair(b_w, b_h, b_u, b_0, b_a, dtype, BITS, OFFSET, 1),
        )
        b_23 = tl.join(
            _pair(b_w, b_h, b_u, b_1, b_a, dtype, BITS, OFFSET, 2),
            _pair(b_w, b_h, b_u, b_1, b_a, dtype, BITS, OFFSET, 3),
        )
        # [N, words, blocks, halves of a pair, pairs by bit 0, pairs by bit 1]
        b_pairs = tl.permute(tl.join(b_01, b_23), (0, 2, 5, 4, 1, 3))
        return tl.reshape(b_pairs, (b_words.shape[0], BLOCKS * 32))


@triton.jit
def _pair(
    b_w, b_h, b_u, b_scale, b_added, dtype: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    P: tl.constexpr
):  # fmt: skip
    return tl.join(
        _weight(b_w, b_h, b_u, b_scale, b_added, dtype, BITS, OFFSET, P),
        _weight(b_w, b_h, b_u, b_scale, b_added, dtype, BITS, OFFSET, P + 4),
    )


@triton.jit
def _weight(
    b_w, b_h, b_u, b_scale, b_added, dtype: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    NIBBLE: tl.constexpr
):  # fmt: skip
    """A weight of each word. The bits above a nibble stand above its bits in the mantissa, see
    `int4_gemm.unpack`."""
    BIASED: tl.constexpr = OFFSET + (2048 if NIBBLE % 2 else 128)
    FIRST: tl.constexpr = 16 if NIBBLE % 2 else 20
    PLACE: tl.constexpr = NIBBLE % 4 + 4 * b_w.shape[2] * (NIBBLE // 4)
    b_values = unpack(b_w, NIBBLE)
    if BITS > 4:
        b_values = _with_bit(b_values, b_h, PLACE, FIRST)
    if BITS > 5:
        b_values = _with_bit(b_values, b_u, PLACE, FIRST + 1)
    return tl.fma(b_values - BIASED, b_scale, b_added).to(dtype)


@triton.jit
def _with_bit(b_values, b_bits, PLACE: tl.constexpr, TARGET: tl.constexpr):
    """Float32 values with the bit at a place of b_bits set as the bit TARGET of their mantissa."""
    SHIFT: tl.constexpr = TARGET - PLACE
    b_moved = b_bits << SHIFT if SHIFT >= 0 else b_bits >> -SHIFT
    return (b_values.to(tl.int32, bitcast=True) | (b_moved & (1 << TARGET))).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _bytes_in_order(b_words):
    """Converts int32 [N, K / 4] to the bytes [N, K] in the order of their inputs; see
    `byte_layout`. Rows of no whole tiles, which are read 32 inputs at a time, have them in that
    order."""
    b_01 = tl.join(b_words & 255, b_words >> 8 & 255)
    b_23 = tl.join(b_words >> 16 & 255, b_words >> 24 & 255)
    # [N, words, place in a half, half]
    b_bytes = tl.join(b_01, b_23)
    if b_words.shape[1] == 8:
        b_bytes = tl.permute(b_bytes, (0, 1, 3, 2))
    else:
        # [N, tiles, c, b, e, h] -> [N, tiles, b, h, c, e]
        b_bytes = tl.reshape(b_bytes, (b_words.shape[0], b_words.shape[1] // 16, 4, 4, 2, 2))
        b_bytes = tl.permute(b_bytes, (0, 1, 3, 5, 2, 4))
    return tl.reshape(b_bytes, (b_words.shape[0], b_words.shape[1] * 4))


@triton.jit(do_not_specialize=["num_rows"])
def _expand_blocks(
    p_words,
    p_high,
    p_scales,
    p_factors,
    p_rows,
    p_out,
    num_rows,
    n,
    k,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    MIN_SIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    WORD: tl.constexpr = 4 if BITS == 8 else 8
    o_t = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    is_t = o_t < num_rows
    i_k = tl.program_id(1) * BLOCK_K
    o_n = (
        tl.minimum(o_t, n - 1)
        if p_rows is None
        else tl.load(p_rows + o_t, mask=is_t, other=0).to(tl.int32)
    )
    o_word = o_n.to(tl.int64) * (k // WORD) + i_k // WORD + tl.arange(0, BLOCK_K // WORD)[None, :]
    b_words = tl.load(p_words + o_word, mask=is_t, other=0)
    b_high = load_high(p_high, i_k, o_n, is_t, n, k, 0, BLOCK_K) if p_high is not None else b_words
    b_upper = load_high(p_high, i_k, o_n, is_t, n, k, 1, BLOCK_K) if BITS == 6 else b_words
    b_first, b_last, b_added = load_scales(
        p_scales, p_factors, i_k, o_n, k, UNIT, MIN_SIGN, BLOCK_K
    )
    b_out = unpack_blocks(
        b_words, b_high, b_upper, b_first, b_last, b_added, p_out.dtype.element_ty, BITS, OFFSET
    )
    tl.store(p_out + o_t.to(tl.int64) * k + i_k + tl.arange(0, BLOCK_K)[None, :], b_out, mask=is_t)
