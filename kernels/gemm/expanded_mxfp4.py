"""Matrices of weights in MXFP4, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quant.mxfp4 import BLOCK, PLACES, TILE, Mxfp4Weight

BLOCK_N = 64
"""Outputs that a program expands, of one tile of inputs."""
_PLACES = tl.constexpr(PLACES)


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
def _bit(b_words, PLACE: tl.constexpr):
    return (b_words >> PLACE) & 1


@triton.jit
def _number(b_words, P: tl.constexpr, E: tl.constexpr):
    """The number at P of a half E of words, as float32."""
    FIRST: tl.constexpr = 16 * E
    b_high = _bit(b_words, FIRST + _PLACES[P][1])
    b_low = _bit(b_words, FIRST + _PLACES[P][2])
    b_mantissa = _bit(b_words, FIRST + _PLACES[P][3])
    b_exponent = 2 * b_high + b_low
    b_twice = tl.where(
        b_exponent == 0, b_mantissa, (2 + b_mantissa) << tl.maximum(b_exponent - 1, 0)
    )
    b_sign = 1 - 2 * _bit(b_words, FIRST + _PLACES[P][0])
    return (b_twice * b_sign).to(tl.float32) * 0.5


@triton.jit
def _pair(b_words, P: tl.constexpr):
    return tl.join(_number(b_words, P, 0), _number(b_words, P, 1))


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
    b_01 = tl.join(_pair(b_words, 0), _pair(b_words, 1))
    b_23 = tl.join(_pair(b_words, 2), _pair(b_words, 3))
    # [N, words, blocks, halves, p by bit 0, p by bit 1]
    b_numbers = tl.permute(tl.join(b_01, b_23), (0, 2, 5, 4, 1, 3))
    b_numbers = tl.reshape(b_numbers, (BLOCK_N, BLOCKS, BLOCK))
    o_group = i_tile * BLOCKS + tl.arange(0, BLOCKS)
    is_scale = is_n[:, None] & (o_group < k // BLOCK)[None, :]
    p_scale = p_scales + o_group.to(tl.int64)[None, :] * n + o_n[:, None]
    b_scale = tl.load(p_scale, mask=is_scale, other=0).to(tl.int32)
    # 2**-127 is below the normal numbers.
    b_power = tl.where(b_scale == 0, 1 << 22, b_scale << 23).to(tl.float32, bitcast=True)
    b_out = tl.reshape(b_numbers * b_power[:, :, None], (BLOCK_N, TILE))
    o_k = i_tile * TILE + tl.arange(0, TILE)
    p_to = p_out + o_n[:, None] * k + o_k[None, :]
    is_out = is_n[:, None] & (o_k < k)[None, :]
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=is_out)
