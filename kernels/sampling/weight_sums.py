"""Sums of weights, each 0 … 1, that no order of addition changes: whole numbers of 2**-40.

Weights are exp(logit − highest logit), so their sum is at least 1 and a rounded weight costs it at
most 2**-40. Ranks add what their tokens weigh, in slices of any size, and have the bits of one
process: no block of the vocabulary has to lie whole on one of them. 2**22 tokens fit.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE = 1 << 40
"""The weight 1."""


@triton.jit
def whole_weights(b_weight):
    """Weights float32 as whole numbers int64, rounded down."""
    return (b_weight * 1099511627776.0).to(tl.int64)


@triton.jit
def weight_of(total):
    """A sum of whole weights as float32."""
    return total.to(tl.float32) * 9.094947017729282e-13
