"""Rows of activations in 8 bits, each row with one scale: what is multiplied with weights of 8 bits.

A scale is the row's largest magnitude over the largest number of the type: 127 of integers, 448 of e4m3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .dependent_launch import launch_options, release_dependents, wait_for_inputs

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each type that is served."""
LEAST_MAGNITUDE = tl.constexpr(1e-30)
"""Largest magnitude below which a row is stored as zeros: the inverse of its scale would not be finite."""
LARGE = tl.constexpr(1.5 * 2**23)


class RoundedTokens(NamedTuple):
    """T tokens, each of K numbers of 8 bits times a scale."""

    values: torch.Tensor
    """float8_e4m3fn or int8 [T, K]"""
    scales: torch.Tensor
    """float32 [T]"""

    @classmethod
    def empty(cls, num_tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> RoundedTokens:
        values = torch.empty(num_tokens, k, dtype=dtype, device=device)
        return cls(values, torch.empty(num_tokens, dtype=torch.float32, device=device))


Tokens = torch.Tensor | RoundedTokens
"""What a product reads, [T, K]."""


def round_tokens(x: torch.Tensor, dtype: torch.dtype, *, dependent: bool = False) -> RoundedTokens:
    """Rounds x [T, K] to a dtype of 8 bits in one launch; halves go to even."""
    num_tokens, k = x.shape
    assert x.stride(1) == 1
    out = RoundedTokens.empty(num_tokens, k, dtype, x.device)
    block = triton.next_power_of_2(k)
    _round_tokens[(num_tokens,)](
        x,
        *out,
        x.stride(0),
        k,
        MOST=MOST[dtype],
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(dependent),
    )
    return out


def round_tokens_twin(x: torch.Tensor, dtype: torch.dtype) -> RoundedTokens:
    """`round_tokens` in plain torch."""
    numbers, most = x.float(), torch.full(x.shape[:1], MOST[dtype], device=x.device)
    magnitude = numbers.abs().amax(1)
    inverse = torch.where(magnitude < LEAST_MAGNITUDE.value, 0.0, most / magnitude)
    rounded = (numbers * inverse[:, None]).clamp(-MOST[dtype], MOST[dtype])
    return RoundedTokens((rounded.round() if dtype == torch.int8 else rounded).to(dtype), magnitude / most)


@triton.jit
def store_rounded(b_x, p_values, p_scale, inside, MOST: tl.constexpr):
    """Stores a token, float32 and zero where it is not inside, as numbers of the type whose largest one is MOST, and
    its scale."""
    magnitude = tl.max(tl.abs(b_x))
    most = magnitude * 0.0 + MOST
    inverse = tl.div_rn(most, tl.maximum(magnitude, LEAST_MAGNITUDE))
    b_y = tl.clamp(b_x * tl.where(magnitude < LEAST_MAGNITUDE, 0.0, inverse), -MOST, MOST)
    # A number so large has no bits behind the point: the sum is rounded, halves to even.
    b_y = ((b_y + LARGE) - LARGE).to(tl.int8) if MOST == 127.0 else b_y.to(tl.float8e4nv)
    tl.store(p_values, b_y, mask=inside)
    tl.store(p_scale, tl.div_rn(magnitude, most))


@triton.jit
def _round_tokens(
    p_x, p_values, p_scales, stride, k, MOST: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    inside = o_k < k
    wait_for_inputs(DEPENDENT)
    b_x = tl.load(p_x + i_token * stride + o_k, mask=inside, other=0.0).to(tl.float32)
    release_dependents(DEPENDENT)
    store_rounded(b_x, p_values + i_token * k + o_k, p_scales + i_token, inside, MOST)
