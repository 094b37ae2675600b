"""x @ weight.T with weights of eight bits on Hopper: the bits of `gemm` over the expanded matrix,
for any number of rows.

Up to `packed_tiles.MOST_ROWS` rows weights become numbers in registers. For more rows the matrix is
expanded into scratch memory and left to `gemm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quant import byte_layout, byte_weights
from ..quant.byte_weights import ByteWeight, Fp8Weight, Int8Weight
from . import gemm, hopper_packed_gemm, packed_tiles, packed_words
from .packed_words import PackedWords

BLOCK_N = 16
BLOCK_K = 256
"""Outputs and inputs that a program expands."""


def fits(weight: ByteWeight) -> bool:
    """Whether a weight can be packed: its groups are contiguous, and it is made of whole tiles."""
    is_ordered = isinstance(weight, Fp8Weight) or weight.groups is None
    return is_ordered and packed_words.fits(weight.shape, len(weight.scales), bits=8)


def pack_in_place(weight: ByteWeight) -> PackedWords:
    """The weight in the order of `byte_layout`, in the memory of its values."""
    weight.values.view(torch.int32).copy_(byte_layout.ordered(weight.values))
    zeros = weight.zeros if isinstance(weight, Int8Weight) else None
    return PackedWords(
        words=weight.values.view(torch.int32), scales=weight.scales, zeros=zeros, bits=8
    )


def byte_linear(x: torch.Tensor, weight: PackedWords, *, dependent: bool = False) -> torch.Tensor:
    """x [M, K] times weight [N, K]: [M, N] in x's dtype, accumulated in float32."""
    tiles = packed_tiles.choose(x.shape[0], *weight.shape, weight.bits)
    if tiles is None or not hopper_packed_gemm.serves(x):
        return gemm.linear(x, expanded(weight, x.dtype), dependent=dependent, is_own=True)
    out = x.new_empty(x.shape[0], weight.shape[0])
    hopper_packed_gemm.hopper_packed_gemm(x, weight, out, tiles, dependent=dependent)
    return out


def expanded(weight: PackedWords, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K], each rounded to the dtype once, in one launch."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.words.device)
    _expand_bytes[(triton.cdiv(n, BLOCK_N), triton.cdiv(k, BLOCK_K))](
        weight.words.view(torch.uint8),
        weight.scales,
        weight.zeros,
        out,
        n,
        k,
        weight.group_size,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
    )
    return out


def expanded_twin(weight: PackedWords, dtype: torch.dtype) -> torch.Tensor:
    """Like `expanded`, in plain torch."""
    if weight.zeros is None:
        values = byte_layout.restored(weight.words, torch.float8_e4m3fn)
        return byte_weights.expand(Fp8Weight(values=values, scales=weight.scales), dtype)
    integers = byte_layout.restored(weight.words, torch.uint8)
    return byte_weights.expand(
        Int8Weight(values=integers, scales=weight.scales, zeros=weight.zeros), dtype
    )


@triton.jit
def _expand_bytes(
    p_values, p_scales, p_zeros, p_out, n, k, group_size, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr
):  # fmt: skip
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    o_k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    is_inside = (o_n < n) & (o_k < k)
    # Input 16 b + 8 h + 2 c + e of 64 is the byte 16 c + 4 b + 2 h + e; see `byte_layout`.
    o_byte = o_k & ~63 | (o_k & 6) << 3 | (o_k & 48) >> 2 | (o_k & 8) >> 2 | o_k & 1
    o_row = o_n.to(tl.int64) * k
    b_bytes = tl.load(p_values + o_row + o_byte, mask=is_inside, other=0)
    o_group = o_k // group_size * n + o_n
    if p_zeros is None:
        b_values = b_bytes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        b_values = b_bytes.to(tl.float32) - tl.load(p_zeros + o_group, mask=is_inside, other=0).to(
            tl.float32
        )
    b_scale = tl.load(p_scales + o_group, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(p_out + o_row + o_k, (b_values * b_scale).to(p_out.dtype.element_ty), mask=is_inside)
