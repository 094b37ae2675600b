"""The arithmetic of attention over latents: that of `online_softmax`, by tiles of fewer keys.

A tile is one piece of latents, read once: all its numbers are keys, the first ones values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..attention.online_softmax import columns, finite, reference, weigh

KEYS = 64
"""Number of keys whose maximum is taken at once. Of two tiles side by side each has sums of its
own, up to the end of a split: two teams compute them."""


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """Numbers as a cache of this dtype holds them; in e4m3 the largest ones stand for what is
    larger."""
    if dtype == tl.float8e4nv:
        b_x = tl.clamp(b_x, -448.0, 448.0)
    return b_x.to(dtype)


@triton.jit
def attend_latents(b_q, latents, visible, qk_scale, b_m, b_l, b_l_other, b_acc):
    """Adds one tile. b_q and latents: numbers without and with a position, [ROWS, rank] and [ROWS,
    rotary], [KEYS, rank] and [KEYS, rotary]; visible [ROWS, KEYS]; qk_scale holds log2(e). State as
    in `online_softmax.attend_tile`, its values [ROWS, rank], its sums those of tiles like this one
    and those of the others."""
    b_s = tl.dot(b_q[0], tl.trans(latents[0]), input_precision="ieee")
    b_s = tl.dot(b_q[1], tl.trans(latents[1]), b_s, input_precision="ieee")
    b_s = tl.where(visible, b_s, float("-inf"))
    b_m_new = tl.maximum(b_m, reference(tl.max(b_s, axis=1) * qk_scale))
    b_shift = finite(b_m_new)
    b_p = weigh(b_s, qk_scale, b_shift)
    b_alpha = tl.exp2(b_m - b_shift)[:, None]
    b_l = tl.fma(b_l, tl.broadcast_to(b_alpha, b_l.shape), columns(b_p))
    b_p = b_p.to(latents[0].dtype)
    b_acc = tl.dot(b_p, latents[0], b_acc * b_alpha, input_precision="ieee")
    return b_m_new, b_l, b_l_other * b_alpha, b_acc
