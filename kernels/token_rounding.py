"""Rows of activations in 8 bits, each row with one scale: what is multiplied with weights of 8 bits.

A scale is the row's largest magnitude over the largest number of the type: 127 of integers, 448 of e4m3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dependent_launch import launch_options, release_dependents, wait_for_inputs

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each type that is served."""
LEAST_MAGNITUDE = tl.constexpr(1e-30)
"""Largest magnitude below which a row is stored as zeros: the inverse of its scale would not be finite."""
LARGE = tl.constexpr(1.5 * 2**23)


def round_tokens(x: torch.Tensor, dtype: torch.dtype, *, dependent: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [T, K] to numbers [T, K] of the dtype and float32 scales [T], in one launch; halves go to even."""
    num_tokens, k = x.shape
    assert x.stride(1) == 1
    values = torch.empty(num_tokens, k, dtype=dtype, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    _round_tokens[(num_tokens,)](
        x,
        values,
        scales,
        x.stride(0),
        k,
        MOST=MOST[dtype],
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(dependent),
    )
    return values, scales


def round_tokens_twin(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`round_tokens` in plain torch."""
    numbers, most = x.float(), torch.full(x.shape[:1], MOST[dtype], device=x.device)
    magnitude = numbers.abs().amax(1)
    inverse = torch.where(magnitude < LEAST_MAGNITUDE.value, 0.0, most / magnitude)
    rounded = (numbers * inverse[:, None]).clamp(-MOST[dtype], MOST[dtype])
    return (rounded.round() if dtype == torch.int8 else rounded).to(dtype), magnitude / most


@triton.jit
def rounded(b_x, b_inverse, MOST: tl.constexpr):
    """Numbers of a type of 8 bits whose largest one is MOST, of float32 numbers times the inverse of their scale."""
    b_y = tl.clamp(b_x * b_inverse, -MOST, MOST)
    # A number so large has no bits behind the point: the sum is rounded, halves to even.
    return ((b_y + LARGE) - LARGE).to(tl.int8) if MOST == 127.0 else b_y.to(tl.float8e4nv)


@triton.jit
def inverse_scale(magnitude, MOST: tl.constexpr):
    """Inverse of the scale of numbers with a largest magnitude."""
    inverse = tl.div_rn(magnitude * 0.0 + MOST, tl.maximum(magnitude, LEAST_MAGNITUDE))
    return tl.where(magnitude < LEAST_MAGNITUDE, 0.0, inverse)


@triton.jit
def _round_tokens(
    p_x, p_values, p_scales, stride, k, MOST: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    is_inside = o_k < k
    wait_for_inputs(DEPENDENT)
    b_x = tl.load(p_x + i_token * stride + o_k, mask=is_inside, other=0.0).to(tl.float32)
    release_dependents(DEPENDENT)
    magnitude = tl.max(tl.abs(b_x))
    b_y = rounded(b_x, inverse_scale(magnitude, MOST), MOST)
    tl.store(p_values + i_token * k + o_k, b_y, mask=is_inside)
    tl.store(p_scales + i_token, tl.div_rn(magnitude, magnitude * 0.0 + MOST))
