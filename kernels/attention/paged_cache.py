"""Reads a tile of keys and values, in halves, out of KV blocks. Knows nothing about attention.

A cache is [num_blocks, Hk, block_size, D]; a sequence's block table names its blocks in order. The
heads of a block lie together, and blocks at any distance: the other layers of a block lie between
them. All values of a cache are finite from its allocation on: bulk copies read to the end of a
tile, and what lies past a sequence weighs zero.

Of an fp8 cache (e4m3) two dimensions lie in 16 bits, i below i + D/2, since what loads operands of
the matrix unit transposes nothing smaller. Kernels take such a cache as int16 [.., D/2] and compute
in float16, which holds its values exactly, with two parts of each head: dimensions 0 … D/2 - 1 and
D/2 … D - 1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .online_softmax import HALF, SPLIT, TILE, narrowing

MAX_BULK_DIM = 256
"""Elements of the longest line that the copy engine reads."""
MAX_ROWS = 1 << 31
"""Rows that the copy engine counts, all layers between the blocks of a cache included."""


def is_paired(cache: torch.Tensor) -> bool:
    return cache.dtype == torch.float8_e4m3fn


def as_pairs(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels see it: pairs in the place of fp8."""
    return cache.view(torch.int16) if is_paired(cache) else cache


def head_constants(q: torch.Tensor, cache: torch.Tensor) -> dict[str, int]:
    """Constants of any kernel that attends with q [N, Hq, D] over a cache [num_blocks, Hk,
    block_size, D]."""
    num_kv_heads = cache.shape[1]
    page = cache.shape[2]
    group = q.shape[1] // num_kv_heads
    head_dim = q.shape[2]
    return {
        "BLOCK_ROWS": block_rows(cache),
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE": page,
        "SPLIT": SPLIT,
    }


def head_bytes(q: torch.Tensor, cache: torch.Tensor) -> int:
    """Bytes of a head as products read it: those of an fp8 cache read float16."""
    return q.shape[2] * (2 if is_paired(cache) else q.element_size())


def attention_constants(q: torch.Tensor, cache: torch.Tensor) -> dict[str, int | bool]:
    """Like `head_constants`, for a kernel for any GPU."""
    assert SPLIT % cache.shape[2] == 0
    by = narrowing(head_bytes(q, cache))
    more = {"TILE": TILE // by, "HALF": HALF // by, "FP8": is_paired(cache), "ON_GPU": q.is_cuda}
    return head_constants(q, cache) | more


def unpaired_twin(cache: torch.Tensor) -> torch.Tensor:
    """An fp8 cache with dimensions in their order."""
    pairs: torch.Tensor = cache.unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2)


def bulk_copied(cache: torch.Tensor) -> bool:
    """Whether half a tile lies within one block and so is a rectangle that the copy engine reads by
    itself."""
    return (
        cache.shape[2] % HALF == 0
        and cache.shape[3] <= MAX_BULK_DIM
        and cache[0].is_contiguous()
        and cache.stride(0) % cache.shape[3] == 0
        and len(cache) * block_rows(cache) < MAX_ROWS
    )


def block_rows(cache: torch.Tensor) -> int:
    """Rows of D elements from a block to the next one."""
    return cache.stride(0) // cache.shape[3]


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """Rows [.., D] of a cache that is `bulk_copied`, as the copy engine reads them: slot s of head
    h of block b is row b x `block_rows` + h x block_size + s."""
    num_blocks, num_heads, page, width = cache.shape
    num_rows = (num_blocks - 1) * block_rows(cache) + num_heads * page
    return cache.as_strided((num_rows, width), (width, 1))


def as_operand(cache: torch.Tensor, half: int = HALF) -> Any:
    """The kernel's argument for this cache: a description for the copy engine, which reads so many
    keys at once, or the tensor."""
    cache = as_pairs(cache)
    if not bulk_copied(cache):
        return cache
    return TensorDescriptor.from_tensor(rows_of(cache), [half, cache.shape[3]])


@triton.jit
def pages_of(p_table_row, first, end, PAGE: tl.constexpr, HALF: tl.constexpr):
    """The blocks of both halves of the tile from `first` on, or of the last position before
    `end`."""
    return (
        tl.load(p_table_row + tl.maximum(tl.minimum(first, end - 1), 0) // PAGE),
        tl.load(p_table_row + tl.maximum(tl.minimum(first + HALF, end - 1), 0) // PAGE),
    )


@triton.jit
def load_tile(cache, pages, first, end, shape: tl.constexpr, ON_GPU: tl.constexpr):
    """Keys [D, HALF] and values [HALF, D] of two halves of a tile from position `first` on, a
    multiple of HALF: each is a tuple, of two parts of the dimensions with FP8, otherwise of one.

    `cache`: keys, values, the row of the block table, the key head, and strides of blocks, heads
    and slots, in elements of what `as_pairs` gives. `shape`: BLOCK_ROWS, HEAD_DIM, PAGE, HALF,
    BULK and FP8. `pages`, of `pages_of`, count where half a tile lies in one block: a caller that
    loads them a tile ahead spares the copy the wait. Positions from `end` on hold what happens to
    be there, or zero.
    """
    k, v, p_table_row, i_kv, stride_block, stride_head, stride_slot = cache
    BLOCK_ROWS: tl.constexpr = shape[0]
    HEAD_DIM: tl.constexpr = shape[1]
    PAGE: tl.constexpr = shape[2]
    HALF: tl.constexpr = shape[3]
    FP8: tl.constexpr = shape[5]
    if shape[4]:
        left = pages[0] * BLOCK_ROWS + i_kv * PAGE + first % PAGE
        right = pages[1] * BLOCK_ROWS + i_kv * PAGE + (first + HALF) % PAGE
        b_k_left = tl.trans(k.load([left, 0]))
        b_k_right = tl.trans(k.load([right, 0]))
        b_v_left = v.load([left, 0])
        b_v_right = v.load([right, 0])
    else:
        where = (i_kv, stride_block, stride_head, stride_slot)
        left, o_left = _offsets(p_table_row, pages[0], first, end, where, PAGE, HALF)
        right, o_right = _offsets(p_table_row, pages[1], first + HALF, end, where, PAGE, HALF)
        o_n = tl.arange(0, HALF)
        o_d = tl.arange(0, HEAD_DIM // 2 if FP8 else HEAD_DIM)
        # Slots past a sequence are not read: half a block a row, a twentieth of all where a row is
        # 600 keys.
        is_left = o_n < end - first
        is_right = o_n < end - first - HALF
        b_k_left = tl.load(
            k + left + (o_left[None, :] + o_d[:, None]), mask=is_left[None, :], other=0
        )
        b_k_right = tl.load(
            k + right + (o_right[None, :] + o_d[:, None]), mask=is_right[None, :], other=0
        )
        b_v_left = tl.load(
            v + left + (o_left[:, None] + o_d[None, :]), mask=is_left[:, None], other=0
        )
        b_v_right = tl.load(
            v + right + (o_right[:, None] + o_d[None, :]), mask=is_right[:, None], other=0
        )
    if FP8:
        keys = _widen(b_k_left, ON_GPU), _widen(b_k_right, ON_GPU)
        values = _widen(b_v_left, ON_GPU), _widen(b_v_right, ON_GPU)
    else:
        keys = ((b_k_left,), (b_k_right,))
        values = ((b_v_left,), (b_v_right,))
    return keys, values


@triton.jit
def _offsets(p_table_row, page, first, end, where, PAGE: tl.constexpr, HALF: tl.constexpr):
    """Offsets of the first key, and of each element from there."""
    i_kv, stride_block, stride_head, stride_slot = where
    if PAGE >= HALF:
        start = page.to(tl.int64) * stride_block + (first % PAGE) * stride_slot + i_kv * stride_head
        o_rest = tl.arange(0, HALF) * stride_slot
    else:
        o_n = tl.minimum(first + tl.arange(0, HALF), end - 1)
        b_block = tl.load(p_table_row + o_n // PAGE).to(tl.int64)
        start = (i_kv * stride_head).to(tl.int64)
        o_rest = b_block * stride_block + (o_n % PAGE) * stride_slot
    return start, o_rest


@triton.jit
def _widen(b_pair, ON_GPU: tl.constexpr):
    """Converts fp8 pairs to float16: lower bytes, and upper bytes.

    Two assembly lines with one result each, elementwise and pure: the compiler moves them behind
    the loads of matrix operands, which then carry pairs.
    """
    if ON_GPU:
        b_low = tl.inline_asm_elementwise(
            "{ .reg .b32 w; .reg .b16 a, b; prmt.b32 w, $1, 0, 0x3120; mov.b32 {a, b}, w; "
            "cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [b_pair], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        b_high = tl.inline_asm_elementwise(
            "{ .reg .b32 w; .reg .b16 a, b; prmt.b32 w, $1, 0, 0x3120; mov.b32 {a, b}, w; "
            "cvt.rn.f16x2.e4m3x2 $0, b; }",
            "=r,r", [b_pair], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_low = (b_pair & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        b_high = ((b_pair >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return b_low, b_high
