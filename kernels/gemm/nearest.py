"""float32 as the matrix unit reads it. Products of float32 have 10 bits of a number's fraction: the
unit cuts the others off, which doubles the error and makes all numbers smaller; the library rounds
them."""

from __future__ import annotations

import triton
import triton.language as tl

HALF = tl.constexpr(1 << 12)
READ = tl.constexpr(-(1 << 13))
"""Half of the last bit of a fraction that the matrix unit reads, and the bits up to it."""


@triton.jit
def nearest(b_x):
    """float32 rounded to the bits that the matrix unit reads, halves away from zero; other types as
    they are."""
    if b_x.dtype == tl.float32:
        b_bits = b_x.to(tl.int32, bitcast=True) + HALF
        b_x = (b_bits & READ).to(tl.float32, bitcast=True)
    return b_x
