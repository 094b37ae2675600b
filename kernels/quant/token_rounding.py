"""Rows of activations in 8 bits, each row with one scale or one for every group of inputs: what is
multiplied with weights of 8 bits.

A scale is the largest magnitude that it covers over the largest number of the type: 127 of
integers, 448 of e4m3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import (
    EARLY_TOKENS,
    launch_options,
    release_dependents,
    wait_for_inputs,
)

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each type that is served."""
LEAST_MAGNITUDE = tl.constexpr(1e-30)
"""Largest magnitude below which a row is stored as zeros: the inverse of its scale would not be
finite."""
LARGE = tl.constexpr(1.5 * 2**23)


class Rounding(NamedTuple):
    """How tokens are rounded."""

    dtype: torch.dtype
    """float8_e4m3fn or int8"""
    group: int = 0
    """Number of inputs that share a scale, a power of two by which they divide; 0: a token has one
    scale."""

    def __str__(self) -> str:
        return f"{self.dtype}, {self.group or 'all'} inputs a scale"


class RoundedTokens(NamedTuple):
    """T tokens, each of K numbers of 8 bits times their scales."""

    values: torch.Tensor
    """float8_e4m3fn or int8 [T, K]"""
    scales: torch.Tensor
    """float32 [T]; of tokens with a scale for every group of inputs [groups, T], so that a product
    reads those of neighbouring tokens at once"""

    @classmethod
    def empty(
        cls, num_tokens: int, k: int, rounding: Rounding, device: torch.device
    ) -> RoundedTokens:
        assert not rounding.group or k % rounding.group == 0
        values = torch.empty(num_tokens, k, dtype=rounding.dtype, device=device)
        shape = (k // rounding.group, num_tokens) if rounding.group else (num_tokens,)
        return cls(values, torch.empty(shape, dtype=torch.float32, device=device))


Tokens = torch.Tensor | RoundedTokens
"""Input of a product, [T, K]."""


def round_tokens(x: torch.Tensor, rounding: Rounding, *, dependent: bool = False) -> RoundedTokens:
    """Rounds x [T, K] in one launch; halves go to even."""
    num_tokens, k = x.shape
    assert x.stride(1) == 1
    out = RoundedTokens.empty(num_tokens, k, rounding, x.device)
    block = triton.next_power_of_2(k)
    _round_tokens[(num_tokens,)](
        x,
        *out,
        x.stride(0),
        k,
        num_tokens,
        MOST=MOST[rounding.dtype],
        SHARED=rounding.group,
        BLOCK=block,
        DEPENDENT=dependent,
        EARLY=num_tokens <= EARLY_TOKENS,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(dependent),
    )
    return out


def round_tokens_twin(x: torch.Tensor, rounding: Rounding) -> RoundedTokens:
    """`round_tokens` in plain torch."""
    dtype = rounding.dtype
    numbers = x.float().unflatten(1, (-1, rounding.group or x.shape[1]))
    magnitude = numbers.abs().amax(2)
    most = torch.full_like(magnitude, MOST[dtype])
    inverse = torch.where(magnitude < LEAST_MAGNITUDE.value, 0.0, most / magnitude)
    rounded = (numbers * inverse[:, :, None]).clamp(-MOST[dtype], MOST[dtype]).flatten(1)
    scales = (magnitude / most).t().contiguous()
    values = (rounded.round() if dtype == torch.int8 else rounded).to(dtype)
    return RoundedTokens(values, scales if rounding.group else scales[0])


@triton.jit
def store_rounded(
    b_x, p_values, p_scales, i_token, num_tokens, inside, k, MOST: tl.constexpr,
    SHARED: tl.constexpr
):  # fmt: skip
    """Stores token i_token of K inputs, float32 [BLOCK] and zero where it is not inside, as numbers
    of the type whose largest one is MOST, and its scale, or that of every SHARED inputs."""
    if SHARED > 0:
        GROUPS: tl.constexpr = b_x.shape[0] // SHARED
        b_groups = tl.reshape(b_x, (GROUPS, SHARED))
        b_y, b_scale = _rounded(b_groups, tl.max(tl.abs(b_groups), axis=1, keep_dims=True), MOST)
        o_group = tl.arange(0, GROUPS)
        tl.store(p_values, tl.reshape(b_y, b_x.shape), mask=inside)
        p_scale = p_scales + o_group.to(tl.int64) * num_tokens + i_token
        tl.store(p_scale, tl.reshape(b_scale, (GROUPS,)), mask=o_group * SHARED < k)
    else:
        b_y, b_scale = _rounded(b_x, tl.max(tl.abs(b_x)), MOST)
        tl.store(p_values, b_y, mask=inside)
        tl.store(p_scales + i_token, b_scale)


@triton.jit
def _rounded(b_x, magnitude, MOST: tl.constexpr):
    """Numbers whose largest magnitude is given, rounded, and their scale."""
    most = magnitude * 0.0 + MOST
    inverse = tl.div_rn(most, tl.maximum(magnitude, LEAST_MAGNITUDE))
    b_y = tl.clamp(b_x * tl.where(magnitude < LEAST_MAGNITUDE, 0.0, inverse), -MOST, MOST)
    # A number so large has no bits behind the point: the sum is rounded, halves to even.
    b_y = ((b_y + LARGE) - LARGE).to(tl.int8) if MOST == 127.0 else b_y.to(tl.float8e4nv)
    return b_y, tl.div_rn(magnitude, most)


@triton.jit(do_not_specialize=["num_tokens"])
def _round_tokens(
    p_x,
    p_values,
    p_scales,
    stride,
    k,
    num_tokens,
    MOST: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    inside = o_k < k
    if EARLY:
        release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    b_x = tl.load(p_x + i_token * stride + o_k, mask=inside, other=0.0).to(tl.float32)
    if not EARLY:
        release_dependents(DEPENDENT)
    store_rounded(
        b_x, p_values + i_token * k + o_k, p_scales, i_token, num_tokens, inside, k, MOST, SHARED
    )
