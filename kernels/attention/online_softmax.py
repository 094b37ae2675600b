"""The one arithmetic of attention: every attention kernel here is these helpers in this order, so
that bits agree.

A row walks its keys in splits of 512, a split in tiles of 128 (fewer where heads are wide) with a
state of its own (maximum, sums, weighted values); finished splits are merged first to last. Decode
gives splits to several programs and merges them in a second kernel, prefill keeps both states in
registers: the same operations on the same numbers. Sums over keys, which a compiler would order by
how a tile lies over its threads, are spelt out: the right half of the columns is added to the left
until one is left.

Weights are relative to the maximum rounded down to a multiple of eight powers of two: that costs no
digit, seldom changes from tile to tile, and a kernel that sees no change need not scale anything: a
factor of one leaves the bits.

A sliding window hides the keys before it, and a chunk of positions, a negative window, those of
earlier chunks. Splits and tiles lie where they lie without one; those of which a row sees nothing
leave its state as it is, to the bit, and may be left out.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
SPLIT = 512
"""Number of keys in a split; also the grain at which a shared prefix is shared."""
TILE = 128
"""Number of keys whose maximum is taken at once; a multiple of `HALF`."""
HALF = 64
"""Number of keys that are read at once."""
MAX_PIPELINED_BYTES = 256
"""Bytes of the largest head of which several tiles fit into shared memory."""
WIDE_BYTES = 512
"""Bytes of the largest head of which one whole tile fits into shared memory."""
BASE_2 = tl.constexpr(LOG2_E)
GRAIN = tl.constexpr(8.0)
"""Weights are relative to a maximum that is rounded down to a multiple of this, in powers of
two."""


def stages_of(most: int, head_bytes: int) -> int:
    """Number of tiles that are copied at once; shared memory holds one tile where both halves of
    heads are large."""
    return most if head_bytes <= MAX_PIPELINED_BYTES else 1


def narrowing(head_bytes: int) -> int:
    """Power of two by which tiles of keys and of query rows are smaller than usual, so that they
    fit into shared memory with large heads."""
    return max(head_bytes // WIDE_BYTES, 1)


def base_2_scale(scale: float | None, head_dim: int) -> float:
    """Factor of scores before base-2 exponentials; a scale of None is 1 / sqrt(head_dim)."""
    return LOG2_E / math.sqrt(head_dim) if scale is None else LOG2_E * scale


@triton.jit
def oldest_key(position, WINDOW: tl.constexpr):
    """The first key that a position sees: of its window of the last WINDOW keys, or of its chunk
    where sequences are cut into chunks of −WINDOW positions."""
    if WINDOW < 0:
        return position // -WINDOW * -WINDOW
    return tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def first_keys(first, seq_len, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """First position of a walk that would begin at `first`, rounded to a multiple of TILE, and the
    oldest key that the last of seq_len positions sees. WINDOW as in `oldest_key`; 0: it sees
    all."""
    oldest = 0
    if WINDOW:
        oldest = oldest_key(seq_len - 1, WINDOW)
        first = tl.maximum(first, oldest // TILE * TILE)
    return first, oldest


@triton.jit
def fresh_state(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, FP8: tl.constexpr):
    """Maxima, sums, and weighted values as a tuple of parts of the dimensions, as keys and values
    are read."""
    b_m = tl.full((ROWS,), float("-inf"), tl.float32)
    b_l = tl.zeros((ROWS, 16), tl.float32)
    b_acc = tl.zeros((ROWS, HEAD_DIM // 2 if FP8 else HEAD_DIM), tl.float32)
    return b_m, b_l, (b_acc, b_acc) if FP8 else (b_acc,)


@triton.jit
def attend_tile(
    b_q,
    keys,
    values,
    visible,
    qk_scale,
    b_m,
    b_l,
    b_acc,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr = 0.0,
):
    """Adds one tile of keys: b_q [ROWS, D], keys [D, 64] and values [64, D] of its halves, each in
    parts of the dimensions; visibility of the keys; qk_scale holds log2(e). Base-2 exponentials.
    Scores are capped by tanh to SOFTCAP; 0: not."""
    b_left = _scores(b_q, keys[0])
    b_right = _scores(b_q, keys[1])
    if SOFTCAP > 0:
        b_left = _capped(b_left, qk_scale, SOFTCAP)
        b_right = _capped(b_right, qk_scale, SOFTCAP)
        qk_scale = SOFTCAP * BASE_2
    if MASKED:
        b_left = tl.where(visible[0], b_left, float("-inf"))
        b_right = tl.where(visible[1], b_right, float("-inf"))
    b_m_new = tl.maximum(b_m, reference(tl.max(tl.maximum(b_left, b_right), axis=1) * qk_scale))
    b_shift = finite(b_m_new)
    b_left = weigh(b_left, qk_scale, b_shift)
    b_right = weigh(b_right, qk_scale, b_shift)
    b_alpha = tl.exp2(b_m - b_shift)[:, None]
    b_l = tl.fma(b_l, tl.broadcast_to(b_alpha, b_l.shape), columns(b_left + b_right))
    b_left = b_left.to(b_q[0].dtype)
    b_right = b_right.to(b_q[0].dtype)
    if len(b_acc) == 1:
        b_acc = (_add_values(b_left, b_right, values[0][0], values[1][0], b_acc[0] * b_alpha),)
    else:
        b_low = _add_values(b_left, b_right, values[0][0], values[1][0], b_acc[0] * b_alpha)
        b_acc = (
            b_low,
            _add_values(b_left, b_right, values[0][1], values[1][1], b_acc[1] * b_alpha),
        )
    return b_m_new, b_l, b_acc


@triton.jit
def parts_of(b_q, FP8: tl.constexpr):
    """Converts [ROWS, D] to the parts that `attend_tile` takes, with FP8 in float16."""
    if FP8:
        b_halves = tl.reshape(b_q.to(tl.float16), (b_q.shape[0], 2, b_q.shape[1] // 2))
        parts = tl.split(tl.permute(b_halves, (0, 2, 1)))
    else:
        parts = (b_q,)
    return parts


@triton.jit
def joined(b_acc):
    """Joins parts to [ROWS, D]."""
    if len(b_acc) == 1:
        b_whole = b_acc[0]
    else:
        b_pairs = tl.permute(tl.join(b_acc[0], b_acc[1]), (0, 2, 1))
        b_whole = tl.reshape(b_pairs, (b_pairs.shape[0], 2 * b_pairs.shape[2]))
    return b_whole


@triton.jit
def merge_states(b_m, b_l, b_acc, b_m_next, b_l_next, b_acc_next):
    """Merges the state of earlier splits and that of the next one, sums [ROWS]. An empty side
    changes nothing, to the bit."""
    b_m_new = tl.maximum(b_m, b_m_next)
    b_shift = finite(b_m_new)
    b_old = tl.exp2(b_m - b_shift)
    b_next = tl.exp2(b_m_next - b_shift)
    b_l = tl.fma(b_l, b_old, b_l_next * b_next)
    b_acc = tl.fma(
        b_acc, tl.broadcast_to(b_old[:, None], b_acc.shape), b_acc_next * b_next[:, None]
    )
    return b_m_new, b_l, b_acc


@triton.jit
def row_sums(b_l):
    """Folds [ROWS, 16] to [ROWS]."""
    b_left, b_right = tl.split(_fold(_fold(_fold(b_l))))
    return b_left + b_right


@triton.jit
def with_sinks(b_m, b_l, p_sinks, o_head, is_head):
    """Sums [ROWS] of complete rows plus the weights of their heads' sinks, float32 [Hq] at p_sinks;
    None: unchanged. Sinks are added once, after the last merge, so that no split counts them
    twice."""
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + o_head, mask=is_head, other=float("-inf"))
        b_log2_e = tl.full(b_sink.shape, BASE_2, tl.float32)
        b_l = b_l + tl.exp2(tl.fma(b_sink, b_log2_e, -finite(b_m)))
    return b_l


@triton.jit
def finish(b_l, b_acc, v_scale):
    return b_acc * (v_scale / b_l)[:, None]


@triton.jit
def _scores(b_q, b_k):
    """Sums the parts of a head in their order, so that terms are added as in one product over all
    dimensions."""
    b_s = tl.dot(b_q[0], b_k[0])
    if len(b_q) == 2:
        b_s = tl.dot(b_q[1], b_k[1], b_s)
    return b_s


@triton.jit
def _capped(b_s, qk_scale, SOFTCAP: tl.constexpr):
    """tanh(score / SOFTCAP), by an exponential that does not overflow."""
    b_scale = tl.full(b_s.shape, -2.0 / SOFTCAP, tl.float32) * qk_scale
    b_small = tl.exp2(tl.abs(b_s) * b_scale)
    b_tanh = (1.0 - b_small) / (1.0 + b_small)
    return tl.where(b_s < 0, -b_tanh, b_tanh)


@triton.jit
def _add_values(b_left, b_right, b_v_left, b_v_right, b_acc):
    b_acc = tl.dot(b_left, b_v_left, b_acc)
    return tl.dot(b_right, b_v_right, b_acc)


@triton.jit
def reference(b_m):
    return tl.floor(b_m * (1.0 / GRAIN)) * GRAIN


@triton.jit
def weigh(b_s, qk_scale, b_shift):
    b_scale = tl.full(b_s.shape, 1.0, tl.float32) * qk_scale
    return tl.exp2(tl.fma(b_s, b_scale, tl.broadcast_to(-b_shift[:, None], b_s.shape)))


@triton.jit
def _fold(b_x):
    """Adds the right half of the columns to the left half."""
    b_halves = tl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2))
    b_left, b_right = tl.split(tl.permute(b_halves, (0, 2, 1)))
    return b_left + b_right


@triton.jit
def columns(b_x):
    """Folds [ROWS, HALF] to [ROWS, 16]."""
    if b_x.shape[1] > 32:
        b_x = _fold(b_x)
    if b_x.shape[1] > 16:
        b_x = _fold(b_x)
    return b_x


@triton.jit
def finite(b_m):
    """Replaces a maximum of minus infinity, that of rows without a key so far, by zero: their
    exponentials stay zero."""
    return tl.where(b_m == float("-inf"), 0.0, b_m)
