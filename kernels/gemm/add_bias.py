"""Adds a bias to a product, in place, and GELU after it where it is wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs

BLOCK = 1024
SQRT_HALF = tl.constexpr(0.7071067811865476)


def add_bias(
    x: torch.Tensor, bias: torch.Tensor, *, has_gelu: bool = False, dependent: bool = False
) -> None:
    """x [T, N] += bias [N], and GELU by the error function of that, rounded to x's dtype once. With
    `dependent`, the previous kernel may still be writing x."""
    num_tokens, width = x.shape
    assert x.is_contiguous()
    block = min(BLOCK, triton.next_power_of_2(width))
    _add_bias[(num_tokens, triton.cdiv(width, block))](
        x,
        bias,
        width,
        BLOCK=block,
        HAS_GELU=has_gelu,
        DEPENDENT=dependent,
        num_warps=4,
        **launch_options(dependent),
    )


@triton.jit
def _add_bias(
    p_x, p_bias, width, BLOCK: tl.constexpr, HAS_GELU: tl.constexpr, DEPENDENT: tl.constexpr
):
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < width
    b_bias = tl.load(p_bias + o_i, mask=inside, other=0.0).to(tl.float32)
    p_row = p_x + tl.program_id(0).to(tl.int64) * width + o_i
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    b_x = tl.load(p_row, mask=inside, other=0.0).to(tl.float32) + b_bias
    if HAS_GELU:
        b_x = 0.5 * b_x * (1.0 + tl.erf(b_x * SQRT_HALF))
    tl.store(p_row, b_x.to(p_x.dtype.element_ty), mask=inside)
