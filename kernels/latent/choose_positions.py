"""Positions of the highest scores of each token. Twin: `index_twin.chosen_twin`.

A radix select over many programs a token: the lowest score that is chosen is found byte by byte, a
launch a byte, from counts of the scores of each part; a last launch writes the positions of each
part behind those of the parts before it. All of it is whole numbers, so the choice depends on the
scores alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SCAN = 4096
FEW_SCAN = 2048
"""Scores that are looked at together, and where few tokens leave multiprocessors without work."""
FEW_TOKENS = 4
MOST_PARTS = 32
"""Most parts of a token's scores: every program reads the counts of all of them."""
BYTES = 4
"""Bytes of a score."""


def choose_positions(
    scores: torch.Tensor, seq_lens: torch.Tensor, chosen: torch.Tensor, num_chosen: int
) -> None:
    """Writes the positions of the `num_chosen` highest scores of each of N tokens, in their order,
    to chosen int32 [N, at least num_chosen]; of equal ones the first are higher. All positions of a
    token that sees no more. scores float32 [N, at least the longest sequence] as `index_scores`
    writes them; seq_lens int32 [N]."""
    num_tokens, longest = scores.shape
    assert scores.stride(1) == chosen.stride(1) == 1
    scan = FEW_SCAN if num_tokens <= FEW_TOKENS else SCAN
    part = triton.cdiv(longest, MOST_PARTS * scan) * scan
    num_parts = triton.cdiv(longest, part)
    counts = seq_lens.new_empty(num_tokens, BYTES, num_parts, 256)
    found = seq_lens.new_empty(num_tokens, BYTES, 2)
    sizes = (num_chosen, part, num_parts, scores.stride(0))
    for byte in range(BYTES):
        _count[(num_tokens, num_parts)](
            scores,
            seq_lens,
            counts,
            found,
            *sizes,
            BYTE=byte,
            PARTS=MOST_PARTS,
            SCAN=scan,
            num_warps=8,
        )
    _write[(num_tokens, num_parts)](
        scores,
        seq_lens,
        counts,
        found,
        chosen,
        *sizes,
        chosen.stride(0),
        PARTS=MOST_PARTS,
        SCAN=scan,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_chosen", "part", "num_parts"])
def _count(
    p_scores,
    p_seq_len,
    p_counts,
    p_found,
    num_chosen,
    part,
    num_parts,
    stride_scores,
    BYTE: tl.constexpr,
    PARTS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Counts the values of one byte, 0 is the highest, among a part's scores whose bytes before it
    are those of the lowest chosen score."""
    i_token = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    seq_len = tl.load(p_seq_len + i_token)
    first = i_part * part
    if (seq_len > num_chosen) & (first < seq_len):
        p_own = p_counts + i_token * 4 * num_parts * 256
        p_own_found = p_found + i_token * 8
        found, left = _lowest(p_own, p_own_found, seq_len, num_chosen, part, num_parts, BYTE, PARTS)
        if i_part == 0:
            tl.store(p_own_found + BYTE * 2, found.to(tl.int32, bitcast=True))
            tl.store(p_own_found + BYTE * 2 + 1, left)
        b_counts = tl.zeros((256,), tl.int32)
        for i_n in range(first, tl.minimum(first + part, seq_len), SCAN):
            o_n = i_n + tl.arange(0, SCAN)
            is_there = o_n < seq_len
            b_x = _ordered(
                tl.load(p_scores + i_token * stride_scores + o_n, mask=is_there, other=0.0)
            )
            if BYTE > 0:
                is_there = is_there & (b_x >> (32 - 8 * BYTE) == found >> (32 - 8 * BYTE))
            b_digit = ((b_x >> (24 - 8 * BYTE)) & 0xFF).to(tl.int32)
            b_counts += tl.histogram(b_digit, 256, mask=is_there)
        tl.store(p_own + (BYTE * num_parts + i_part) * 256 + tl.arange(0, 256), b_counts)


@triton.jit(do_not_specialize=["num_chosen", "part", "num_parts"])
def _write(
    p_scores,
    p_seq_len,
    p_counts,
    p_found,
    p_chosen,
    num_chosen,
    part,
    num_parts,
    stride_scores,
    stride_chosen,
    PARTS: tl.constexpr,
    SCAN: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    seq_len = tl.load(p_seq_len + i_token)
    first = i_part * part
    end = tl.minimum(first + part, seq_len)
    p_out = p_chosen + i_token * stride_chosen
    if seq_len <= num_chosen:
        for i_n in range(first, end, SCAN):
            o_n = i_n + tl.arange(0, SCAN)
            tl.store(p_out + o_n, o_n, mask=o_n < end)
    elif first < seq_len:
        p_own = p_counts + i_token * 4 * num_parts * 256
        found, left = _lowest(
            p_own, p_found + i_token * 8, seq_len, num_chosen, part, num_parts, 4, PARTS
        )
        num_higher, num_equal = _before(p_own, found, i_part, num_parts, PARTS)
        num_out = num_higher + tl.minimum(num_equal, left)
        left = tl.maximum(left - num_equal, 0)
        for i_n in range(first, end, SCAN):
            o_n = i_n + tl.arange(0, SCAN)
            is_there = o_n < end
            b_x = _ordered(
                tl.load(p_scores + i_token * stride_scores + o_n, mask=is_there, other=0.0)
            )
            b_equal = (is_there & (b_x == found)).to(tl.int32)
            is_first = (b_equal == 1) & (tl.cumsum(b_equal, axis=0) <= left)
            is_chosen = is_there & ((b_x > found) | is_first)
            b_place = num_out + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
            tl.store(p_out + b_place, o_n, mask=is_chosen)
            left -= tl.sum(is_first.to(tl.int32), axis=0)
            num_out += tl.sum(is_chosen.to(tl.int32), axis=0)


@triton.jit
def _lowest(
    p_counts,
    p_found,
    seq_len,
    num_chosen,
    part,
    num_parts,
    BYTE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The first `BYTE` bytes of the lowest chosen score, zeros behind them, and the number of
    positions to choose among the scores that begin with them."""
    if BYTE == 0:
        return tl.full((), 0, tl.uint32), num_chosen
    else:
        found = tl.load(p_found + (BYTE - 1) * 2).to(tl.uint32, bitcast=True)
        left = tl.load(p_found + (BYTE - 1) * 2 + 1)
        o_part = tl.arange(0, PARTS)[:, None]
        o_digit = tl.arange(0, 256)
        p_parts = p_counts + ((BYTE - 1) * num_parts + o_part) * 256
        # Parts behind the sequence's end have no counts.
        is_part = o_part * part < seq_len
        b_counts = tl.sum(tl.load(p_parts + o_digit[None, :], mask=is_part, other=0), axis=0)
        b_above = tl.sum(b_counts, axis=0) - tl.cumsum(b_counts, axis=0)
        is_digit = (b_above < left) & (b_above + b_counts >= left)
        digit = tl.sum(tl.where(is_digit, o_digit, 0), axis=0)
        left -= tl.sum(tl.where(is_digit, b_above, 0), axis=0)
        return found | (digit.to(tl.uint32) << (32 - 8 * BYTE)), left


@triton.jit
def _before(p_counts, found, i_part, num_parts, PARTS: tl.constexpr):
    """Numbers of the scores above `found`, and of those equal to it, in the parts before one."""
    o_part = tl.arange(0, PARTS)[:, None]
    o_digit = tl.arange(0, 256)[None, :]
    num_higher = tl.full((), 0, tl.int32)
    num_equal = tl.full((), 0, tl.int32)
    for i_byte in tl.static_range(4):
        p_parts = p_counts + (i_byte * num_parts + o_part) * 256 + o_digit
        b_counts = tl.load(p_parts, mask=o_part < i_part, other=0)
        digit = ((found >> (24 - 8 * i_byte)) & 0xFF).to(tl.int32)
        num_higher += tl.sum(tl.where(o_digit > digit, b_counts, 0))
        if i_byte == 3:
            num_equal += tl.sum(tl.where(o_digit == digit, b_counts, 0))
    return num_higher, num_equal


@triton.jit
def _ordered(b_score):
    """Whole numbers without a sign in the order of scores."""
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_bits = tl.where(b_bits < 0, ~b_bits, b_bits | -2147483648)
    return b_bits.to(tl.uint32, bitcast=True)
