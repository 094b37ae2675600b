"""Products of the heads of tokens with a matrix for each head: from queries to queries over
latents, and from latents that a head attended to, to its values. Twin: `latent_twin`.

A row's sum walks its terms in one order, in steps of 64, whatever rows are beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEW_ROWS = 64
"""Number of tokens up to which a program has 16 rows."""
MANY_ROWS = 128
BLOCK_N = 64
BLOCK_K = 64


def absorbed_queries(q: torch.Tensor, kv_b: torch.Tensor, width: int) -> torch.Tensor:
    """Queries q [E, Hq, D], contiguous, of D - (width - rank) numbers without a position and
    width - rank with one → [E, Hq, width]: the first ones times W_UK, then the others. kv_b [Hq,
    numbers without a position + value, rank], contiguous, begins with W_UK of each head."""
    num_rows, num_heads, head_dim = q.shape
    rank = kv_b.shape[2]
    rotary = width - rank
    out = q.new_empty(num_rows, num_heads, width)
    _multiply(q, kv_b, out, (rank, head_dim - rotary), (1, rank), rotary)
    return out


def head_values(attended: torch.Tensor, kv_b: torch.Tensor, value_dim: int) -> torch.Tensor:
    """Latents that heads attended to [E, Hq, rank], contiguous, times W_UV, the last `value_dim`
    rows of each head of kv_b [Hq, D, rank], contiguous → [E, Hq · value_dim]."""
    num_rows, num_heads, rank = attended.shape
    out = attended.new_empty(num_rows, num_heads, value_dim)
    _multiply(attended, kv_b[:, -value_dim:], out, (value_dim, rank), (rank, 1), 0)
    return out.flatten(1)


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    sizes: tuple[int, int],
    strides: tuple[int, int],
    num_copied: int,
) -> None:
    """out [E, Hq, N]: x [E, Hq, K] times a matrix of each head, whose rows and columns have these
    strides; behind the N numbers of a head it copies the last `num_copied` ones of x."""
    num_rows, num_heads, _ = x.shape
    n, k = sizes
    assert x.is_contiguous()
    assert out.is_contiguous()
    if num_rows == 0:
        return
    rows = 16 if num_rows <= FEW_ROWS else MANY_ROWS
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(n, BLOCK_N) + (num_copied > 0), num_heads)
    _multiply_heads[grid](
        x,
        weight,
        out,
        num_rows,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        out.stride(0),
        out.stride(1),
        N=n,
        K=k,
        STRIDE_N=strides[0],
        STRIDE_K=strides[1],
        COPIED=num_copied,
        BLOCK_COPIED=triton.next_power_of_2(max(num_copied, 1)),
        ROWS=rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_heads(
    p_x,
    p_weight,
    p_out,
    num_rows,
    stride_x,
    stride_x_head,
    stride_weight,
    stride_out,
    stride_out_head,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    COPIED: tl.constexpr,
    BLOCK_COPIED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i_head = tl.program_id(2).to(tl.int64)
    o_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (o_m < num_rows)[:, None]
    p_rows = p_x + o_m.to(tl.int64)[:, None] * stride_x + i_head * stride_x_head
    p_outs = p_out + o_m.to(tl.int64)[:, None] * stride_out + i_head * stride_out_head
    if tl.program_id(1) * BLOCK_N < N:
        o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        p_own = p_weight + i_head * stride_weight
        b_sum = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for i_k in range(0, K, BLOCK_K):
            is_k = i_k + o_k < K
            b_x = tl.load(p_rows + i_k + o_k[None, :], mask=is_row & is_k[None, :], other=0.0)
            p_w = p_own + (i_k + o_k)[:, None] * STRIDE_K + o_n[None, :] * STRIDE_N
            b_w = tl.load(p_w, mask=is_k[:, None] & (o_n < N)[None, :], other=0.0)
            b_sum = tl.dot(b_x, b_w, b_sum, input_precision="ieee")
        b_out = b_sum.to(p_out.dtype.element_ty)
        tl.store(p_outs + o_n[None, :], b_out, mask=is_row & (o_n < N)[None, :])
    else:
        o_t = tl.arange(0, BLOCK_COPIED)[None, :]
        is_copied = is_row & (o_t < COPIED)
        b_x = tl.load(p_rows + K + o_t, mask=is_copied, other=0.0)
        tl.store(p_outs + N + o_t, b_x, mask=is_copied)
