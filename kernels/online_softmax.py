"""The one arithmetic of attention: every attention kernel here is these helpers in this order, so that bits agree.

A row walks its keys in splits of 512, a split in tiles of 64 with a state of its own (maximum, sum, weighted values);
finished splits are merged first to last. Decode gives splits to several programs and merges them in a second kernel,
prefill keeps both states in registers: the same operations on the same numbers. Sums over keys go through the matrix
unit, whose order does not depend on how a tile is laid out over threads; a plain sum's would.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPLIT = 512
"""Keys a split; also the grain at which a shared prefix is shared."""
TILE = 64
SUM_WIDTH = 16
"""Columns of ones that turn a sum into a product; the narrowest the compiler takes on every path."""


@triton.jit
def fresh_state(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    b_m = tl.full((ROWS,), float("-inf"), tl.float32)
    b_l = tl.zeros((ROWS, 16), tl.float32)
    b_acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    return b_m, b_l, b_acc


@triton.jit
def attend_tile(b_q, b_k, b_v, b_visible, qk_scale, b_m, b_l, b_acc, MASKED: tl.constexpr, TILE: tl.constexpr):
    """One tile of keys: b_q [ROWS, D], b_k [D, TILE], b_v [TILE, D]; qk_scale holds log2(e). Base-2 exponentials."""
    b_s = tl.dot(b_q, b_k.to(b_q.dtype))
    if MASKED:
        b_s = tl.where(b_visible, b_s, float("-inf"))
    b_m_new = tl.maximum(b_m, tl.max(b_s, axis=1) * qk_scale)
    b_shift = _finite(b_m_new)
    b_p = tl.exp2(tl.fma(b_s, tl.zeros_like(b_s) + qk_scale, tl.zeros_like(b_s) - b_shift[:, None])).to(b_q.dtype)
    b_alpha = tl.exp2(b_m - b_shift)
    b_ones = tl.full((TILE, 16), 1.0, tl.float32).to(b_q.dtype)
    b_l = tl.dot(b_p, b_ones, b_l * b_alpha[:, None])
    b_acc = tl.dot(b_p, b_v.to(b_q.dtype), b_acc * b_alpha[:, None])
    return b_m_new, b_l, b_acc


@triton.jit
def merge_states(b_m, b_l, b_acc, b_m_next, b_l_next, b_acc_next):
    """The state of earlier splits and that of the next one. An empty side changes nothing, to the bit."""
    b_m_new = tl.maximum(b_m, b_m_next)
    b_shift = _finite(b_m_new)
    b_old = tl.exp2(b_m - b_shift)
    b_next = tl.exp2(b_m_next - b_shift)
    b_l = tl.fma(b_l, b_old, b_l_next * b_next)
    b_old = b_old[:, None] + tl.zeros_like(b_acc)
    b_acc = tl.fma(b_acc, b_old, b_acc_next * b_next[:, None])
    return b_m_new, b_l, b_acc


@triton.jit
def row_sums(b_l):
    """[ROWS, 16] equal columns to [ROWS]."""
    return tl.max(b_l, axis=1)


@triton.jit
def finish(b_l, b_acc, v_scale):
    return b_acc * (v_scale / b_l)[:, None]


@triton.jit
def _finite(b_m):
    """Rows that saw no key yet have a maximum of minus infinity; zero in its place keeps their exponentials zero."""
    return tl.where(b_m == float("-inf"), 0.0, b_m)
