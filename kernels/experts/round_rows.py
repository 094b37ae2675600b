"""Tokens in 8 bits in the rows of their experts: rounded as by `round_tokens`, copied as by
`copy_tokens`, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from ..quant.token_rounding import MOST, RoundedTokens, Rounding, store_rounded


def round_rows(
    x: torch.Tensor,
    rounding: Rounding,
    places: torch.Tensor,
    num_rows: int,
    *,
    dependent: bool = False,
) -> RoundedTokens:
    """Returns so many rows with tokens x [T, K] in those that `places` int32 [T k] names; −1: in
    none. Others have any numbers."""
    num_tokens, k = x.shape
    assert x.stride(1) == 1
    out = RoundedTokens.empty(num_rows, k, rounding, x.device)
    block = triton.next_power_of_2(k)
    _round_rows[(num_tokens,)](
        x,
        *out,
        places,
        x.stride(0),
        k,
        num_rows,
        CHOSEN=len(places) // num_tokens,
        MOST=MOST[rounding.dtype],
        SHARED=rounding.group,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(dependent),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _round_rows(
    p_x,
    p_values,
    p_scales,
    p_places,
    stride,
    k,
    num_rows,
    CHOSEN: tl.constexpr,
    MOST: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    inside = o_k < k
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    b_x = tl.load(p_x + i_token * stride + o_k, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(CHOSEN):
        i_row = tl.load(p_places + i_token * CHOSEN + i).to(tl.int64)
        if i_row >= 0:
            p_row = p_values + i_row * k + o_k
            store_rounded(b_x, p_row, p_scales, i_row, num_rows, inside, k, MOST, SHARED)
