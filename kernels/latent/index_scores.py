"""Scores of a sparse indexer: of each latent of a token's sequence, out of a paged cache, and the
positions of the highest ones. Twin: `index_twin`.

A score has one order of sums, whatever else is computed; positions are chosen by whole numbers in the
order of scores, so that the choice depends on nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEYS = 64
"""Keys of a tile."""
PART = 1024
"""Keys of a program."""
SCAN = 4096
"""Scores that are looked at together."""
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
    """Writes scores float32 [N, at least the longest sequence] of N tokens: q [N, Hi, D], contiguous;
    head_weights float32 [N, Hi]; keys [num_blocks, block_size, D], whose rows may lie apart;
    seq_lens int32 [N]: keys that a token sees, its own included; table_rows int32 [N] into
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


def choose_positions(
    scores: torch.Tensor, seq_lens: torch.Tensor, chosen: torch.Tensor, num_chosen: int
) -> None:
    """Writes the positions of the `num_chosen` highest scores of each of N tokens, in their order,
    to chosen int32 [N, at least num_chosen]; of equal ones the first are higher. All positions of a
    token that sees no more. scores and seq_lens as in `index_scores`."""
    _choose[(len(seq_lens),)](
        scores,
        seq_lens,
        chosen,
        num_chosen,
        scores.stride(0),
        chosen.stride(0),
        SCAN=SCAN,
        num_warps=8,
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
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            # Zeros have one sign, by which they would differ in order.
            b_sum = tl.sum(tl.maximum(b_s, 0.0) * b_weight, axis=0) + 0.0
            tl.store(p_own + o_n, b_sum, mask=is_key)


@triton.jit(do_not_specialize=["num_chosen"])
def _choose(
    p_scores,
    p_seq_len,
    p_chosen,
    num_chosen,
    stride_scores,
    stride_chosen,
    SCAN: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(p_seq_len + i_token)
    p_own = p_scores + i_token * stride_scores
    p_out = p_chosen + i_token * stride_chosen
    o_n = tl.arange(0, SCAN)
    if seq_len <= num_chosen:
        for i_n in range(0, seq_len, SCAN):
            tl.store(p_out + i_n + o_n, i_n + o_n, mask=i_n + o_n < seq_len)
    else:
        # The lowest score that is chosen is found from its highest byte on. `left`: the number of
        # positions to choose among those whose first bytes are those found so far.
        o_digit = tl.arange(0, 256)
        found = tl.full((), 0, tl.uint32)
        left = num_chosen
        for i_byte in tl.static_range(4):
            b_counts = tl.zeros((256,), tl.int32)
            for i_n in range(0, seq_len, SCAN):
                is_there = i_n + o_n < seq_len
                b_x = _ordered(tl.load(p_own + i_n + o_n, mask=is_there, other=0.0))
                if i_byte > 0:
                    is_there = is_there & (b_x >> (32 - 8 * i_byte) == found >> (32 - 8 * i_byte))
                b_digit = ((b_x >> (24 - 8 * i_byte)) & 0xFF).to(tl.int32)
                b_counts += tl.histogram(b_digit, 256, mask=is_there)
            b_above = tl.sum(b_counts, axis=0) - tl.cumsum(b_counts, axis=0)
            is_digit = (b_above < left) & (b_above + b_counts >= left)
            digit = tl.sum(tl.where(is_digit, o_digit, 0), axis=0)
            left -= tl.sum(tl.where(is_digit, b_above, 0), axis=0)
            found = found | (digit.to(tl.uint32) << (24 - 8 * i_byte))
        num_out = 0
        for i_n in range(0, seq_len, SCAN):
            is_there = i_n + o_n < seq_len
            b_x = _ordered(tl.load(p_own + i_n + o_n, mask=is_there, other=0.0))
            b_equal = (is_there & (b_x == found)).to(tl.int32)
            is_first = (b_equal == 1) & (tl.cumsum(b_equal, axis=0) <= left)
            is_chosen = is_there & ((b_x > found) | is_first)
            b_place = num_out + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
            tl.store(p_out + b_place, i_n + o_n, mask=is_chosen)
            left -= tl.sum(is_first.to(tl.int32), axis=0)
            num_out += tl.sum(is_chosen.to(tl.int32), axis=0)


@triton.jit
def _ordered(b_score):
    """Whole numbers without a sign in the order of scores."""
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_bits = tl.where(b_bits < 0, ~b_bits, b_bits | -2147483648)
    return b_bits.to(tl.uint32, bitcast=True)
