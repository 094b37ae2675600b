"""Sums of rows, each in an order that depends on its width alone: torch's own on a GPU depend on
the number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_BLOCK = 8192
"""Numbers of a row that are added at once."""


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """x [R, K] with contiguous rows → [R] in x's dtype, added in float32."""
    assert x.stride(1) == 1 or x.shape[1] == 1
    num_rows, width = x.shape
    out = x.new_empty(num_rows)
    block = min(triton.next_power_of_2(width), MOST_BLOCK)
    _row_sum[(num_rows,)](
        x, out, x.stride(0), width, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
    )
    return out


def row_sum_twin(x: torch.Tensor) -> torch.Tensor:
    """Like `row_sum`, in plain torch."""
    return x.sum(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


@triton.jit
def _row_sum(p_x, p_out, stride_x, width, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        o_k = first + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + i_row * stride_x + o_k, mask=o_k < width, other=0.0)
        b_sum += b_x.to(tl.float32)
    tl.store(p_out + i_row, tl.sum(b_sum, axis=0).to(p_out.dtype.element_ty))
