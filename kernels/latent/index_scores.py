"""Scores of a sparse indexer: of each latent of a token's sequence, out of a paged cache. Twin:
`index_twin`. A score has one order of sums, whatever else is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEYS = 64
"""Keys of a tile."""
PART = 1024
"""Keys of a program."""
SMALLEST = 16
"""Smallest side of a product."""


def index_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    scores: torch.Tensor,
    num_chosen: int,
) -> None:
    """Writes scores float32 [N, at least the longest sequence] of N tokens: q [N, Hi, D],
    contiguous; head_weights float32 [N, Hi]; keys [num_blocks, block_size, D], whose rows may lie
    apart; seq_lens int32 [N]: keys that a token sees, its own included; table_rows int32 [N] into
    block_tables int32 [rows, blocks]. Tokens that see at most `num_chosen` keys have none."""
    num_tokens, num_heads, dim = q.shape
    assert q.is_contiguous()
    assert head_weights.is_contiguous()
    assert keys.stride(2) == scores.stride(1) == 1
    longest = min(block_tables.shape[1] * keys.shape[1], scores.shape[1])
    _score[(num_tokens, triton.cdiv(longest, PART))](
        q,
        head_weights,
        keys,
        seq_lens,
        table_rows,
        block_tables,
        scores,
        num_chosen,
        keys.stride(0),
        block_tables.stride(0),
        scores.stride(0),
        stride_slot=keys.stride(1),
        HEADS=num_heads,
        BLOCK_HEADS=max(triton.next_power_of_2(num_heads), SMALLEST),
        DIM=dim,
        BLOCK_DIM=max(triton.next_power_of_2(dim), SMALLEST),
        PAGE=keys.shape[1],
        KEYS=KEYS,
        PART=PART,
        num_warps=4,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["num_chosen"])
def _score(
    p_q,
    p_weight,
    p_keys,
    p_seq_len,
    p_table_row,
    p_table,
    p_scores,
    num_chosen,
    stride_block,
    stride_table,
    stride_scores,
    stride_slot: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
):
    i_token = tl.program_id(0)
    seq_len = tl.load(p_seq_len + i_token)
    first = tl.program_id(1) * PART
    if (seq_len > num_chosen) & (first < seq_len):
        o_h = tl.arange(0, BLOCK_HEADS)
        o_d = tl.arange(0, BLOCK_DIM)
        is_h = o_h < HEADS
        is_d = (o_d < DIM)[None, :]
        p_heads = p_q + (i_token.to(tl.int64) * HEADS + o_h)[:, None] * DIM
        b_q = tl.load(p_heads + o_d[None, :], mask=is_h[:, None] & is_d, other=0.0)
        b_weight = tl.load(p_weight + i_token * HEADS + o_h, mask=is_h, other=0.0)[:, None]
        p_row = p_table + tl.load(p_table_row + i_token).to(tl.int64) * stride_table
        p_own = p_scores + i_token.to(tl.int64) * stride_scores
        for i_n in range(first, tl.minimum(first + PART, seq_len), KEYS):
            o_n = i_n + tl.arange(0, KEYS)
            is_key = o_n < seq_len
            b_block = tl.load(p_row + tl.minimum(o_n, seq_len - 1) // PAGE).to(tl.int64)
            p_tile = p_keys + (b_block * stride_block + o_n % PAGE * stride_slot)[:, None]
            b_k = tl.load(p_tile + o_d[None, :], mask=is_key[:, None] & is_d, other=0.0)
            b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")
            # Gives all zeros one sign: zeros of two signs would differ in order.
            b_sum = tl.sum(tl.maximum(b_s, 0.0) * b_weight, axis=0) + 0.0
            tl.store(p_own + o_n, b_sum, mask=is_key)
