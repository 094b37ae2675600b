"""Matrices of weights in MXFP4, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quant.mxfp4 import BLOCK, PLACES, TILE, Mxfp4Weight

BLOCK_N = 64
"""Outputs that a program expands, of one tile of inputs."""
_PLACES = tl.constexpr(PLACES)
_TWICE = tl.constexpr(0xC8643210 - (1 << 32))
"""Twice the numbers of e2m1, four bits each."""
_SIGN = tl.constexpr(-(1 << 31))


def expanded(weight: Mxfp4Weight, dtype: torch.dtype) -> torch.Tensor:
    """`mxfp4.expand` on the weight's device."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.words.device)
    _expand[(triton.cdiv(n, BLOCK_N), triton.cdiv(k, TILE))](
        weight.words,
        weight.scales,
        out,
        n,
        k,
        weight.words.shape[1],
        BLOCK_N=BLOCK_N,
        TILE=TILE,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _shifted(b_words, SHIFT: tl.constexpr):
    """Words shifted right or, for a negative count, left."""
    return b_words >> SHIFT if SHIFT >= 0 else b_words << -SHIFT


@triton.jit
def _number(b_words, b_half, b_offset, P: tl.constexpr, E: tl.constexpr):
    """The weight at P of a half E of words, in float32: `b_half` is half of its scale, `b_offset`
    minus 2**23 times as much. Twice a number of e2m1, without its sign, becomes the last bits of
    2**23; the fused product and sum is exact."""
    FIRST: tl.constexpr = 16 * E
    SIGN: tl.constexpr = FIRST + _PLACES[P][0]
    MANTISSA: tl.constexpr = FIRST + _PLACES[P][3]
    if P == 3:
        b_place = _shifted(b_words, FIRST + _PLACES[P][2] - 3) & 0x18
        b_place = b_place | (_shifted(b_words, MANTISSA - 2) & 0x4)
    else:
        b_place = _shifted(b_words, MANTISSA - 2) & 0x1C
    b_twice = (_TWICE >> b_place) & 0xF
    b_number = (b_twice | 0x4B000000).to(tl.float32, bitcast=True)
    b_weight = tl.fma(b_number, b_half, b_offset)
    b_sign = (b_words << (31 - SIGN)) & _SIGN
    return (b_weight.to(tl.int32, bitcast=True) ^ b_sign).to(tl.float32, bitcast=True)


@triton.jit
def _pair(b_words, b_half, b_offset, P: tl.constexpr):
    return tl.join(
        _number(b_words, b_half, b_offset, P, 0), _number(b_words, b_half, b_offset, P, 1)
    )


@triton.jit
def _expand(
    p_words,
    p_scales,
    p_out,
    n,
    k,
    num_words,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = TILE // BLOCK
    i_tile = tl.program_id(1)
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_n = o_n < n
    o_word = i_tile * (TILE // 8) + tl.arange(0, TILE // 8)
    p_row = p_words + o_n[:, None] * num_words + o_word[None, :]
    b_words = tl.load(p_row, mask=is_n[:, None], other=0)
    b_words = tl.reshape(b_words, (BLOCK_N, 4, BLOCKS))
    o_group = i_tile * BLOCKS + tl.arange(0, BLOCKS)
    is_scale = is_n[:, None] & (o_group < k // BLOCK)[None, :]
    p_scale = p_scales + o_group.to(tl.int64)[None, :] * n + o_n[:, None]
    b_scale = tl.load(p_scale, mask=is_scale, other=0).to(tl.int32)
    # 2**-127 and 2**-128 are below the normal numbers.
    b_half = tl.where(b_scale > 1, (b_scale - 1) << 23, 1 << (21 + b_scale))
    b_half = b_half.to(tl.float32, bitcast=True)[:, None, :]
    b_half = tl.broadcast_to(b_half, b_words.shape)
    b_offset = b_half * -8388608.0
    b_01 = tl.join(_pair(b_words, b_half, b_offset, 0), _pair(b_words, b_half, b_offset, 1))
    b_23 = tl.join(_pair(b_words, b_half, b_offset, 2), _pair(b_words, b_half, b_offset, 3))
    # [N, words, blocks, halves, p by bit 0, p by bit 1]
    b_pairs = tl.join(b_01, b_23).to(p_out.dtype.element_ty)
    b_out = tl.reshape(tl.permute(b_pairs, (0, 2, 5, 4, 1, 3)), (BLOCK_N, TILE))
    o_k = i_tile * TILE + tl.arange(0, TILE)
    p_to = p_out + o_n[:, None] * k + o_k[None, :]
    is_out = is_n[:, None] & (o_k < k)[None, :]
    tl.store(p_to, b_out, mask=is_out)
