"""How kernels read a tile of keys and values out of KV blocks. Knows nothing about attention.

A cache is [num_blocks, Hk, block_size, D]; a sequence's block table names its blocks in order. All values of a cache
are finite from its allocation on: kernels read to the end of a tile and weigh what lies past a sequence with zero.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.kernels.online_softmax import TILE


def bulk_copied(cache: torch.Tensor) -> bool:
    """Whether a tile lies within one block and so is a rectangle that the copy engine reads by itself."""
    return cache.shape[2] % TILE == 0 and cache[0].is_contiguous() and cache.stride(0) == cache[0].numel()


def as_operand(cache: torch.Tensor) -> Any:
    """What a kernel takes for this cache: a description for the copy engine, or the tensor."""
    if not bulk_copied(cache):
        return cache
    return TensorDescriptor.from_tensor(cache.view(-1, cache.shape[3]), [TILE, cache.shape[3]])


@triton.jit
def page_of(p_table_row, position, end, PAGE: tl.constexpr):
    """The block of a position, or of the last one before `end`."""
    return tl.load(p_table_row + tl.minimum(position, end - 1) // PAGE)


@triton.jit
def load_tile(
    k,
    v,
    p_table_row,
    page,
    first,
    end,
    i_kv,
    stride_block,
    stride_head,
    stride_slot,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BULK: tl.constexpr,
    FP8: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Keys [D, TILE] and values [TILE, D] of positions first … first + TILE - 1, a multiple of TILE, in block `page`.

    `page` counts for bulk copies only: a caller that loads it a tile ahead spares the copy the wait for it. Positions
    from `end` on hold what happens to be there, or the last key before.
    """
    if BULK:
        row = (page * NUM_KV_HEADS + i_kv) * PAGE + first % PAGE
        b_k = tl.trans(k.load([row, 0]))
        b_v = v.load([row, 0])
    else:
        o_d = tl.arange(0, HEAD_DIM)
        o_n = first + tl.arange(0, TILE)
        if PAGE >= TILE:
            block = tl.load(p_table_row + first // PAGE).to(tl.int64)
            o_kv = block * stride_block + (o_n % PAGE) * stride_slot + i_kv * stride_head
        else:
            o_n = tl.minimum(o_n, end - 1)
            b_block = tl.load(p_table_row + o_n // PAGE).to(tl.int64)
            o_kv = b_block * stride_block + (o_n % PAGE) * stride_slot + i_kv * stride_head
        b_k = tl.load(k + o_kv[None, :] + o_d[:, None])
        b_v = tl.load(v + o_kv[:, None] + o_d[None, :])
    if FP8:
        b_k, b_v = _widen(b_k, ON_GPU), _widen(b_v, ON_GPU)
    return b_k, b_v


@triton.jit
def _widen(b_x, ON_GPU: tl.constexpr):
    """fp8 to float16, which holds it exactly and which the chip converts to in one instruction.

    NOTE: a product whose operand the compiler can trace to an 8-bit load takes its terms in another order, and bits
    would depend on which instruction a kernel's tile calls for. An assembly line, opaque, keeps it from looking.
    """
    b_x = b_x.to(tl.float16)
    if ON_GPU:
        b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=tl.float16, is_pure=False, pack=2)
    return b_x
