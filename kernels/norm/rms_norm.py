"""RMSNorm over the last dimension, with or without the residual add before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import (
    EARLY_TOKENS,
    launch_options,
    release_dependents,
    wait_for_inputs,
)
from ..quant.token_rounding import MOST, RoundedTokens, Rounding, store_rounded

EARLY_HIDDEN = 1024
"""Largest width at which the following product has weights so small that it prefetches all of them
before its inputs are there (`gemm.EARLY_BYTES`); wider ones only take room from those that still
work. Products that fill rings with weights start early at any width, see `EARLY_TOKENS`."""


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    dependent: bool = False,
    early: bool = False,
) -> torch.Tensor:
    """RMSNorm of x [T, H] with contiguous rows by weight [H]; returns out [T, H] in x's dtype.
    `early`: the product that reads it fills rings with weights."""
    out = torch.empty_like(x) if out is None else out
    _launch(x, x, weight, eps, out, has_residual=False, dependent=dependent, early=early)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    dependent: bool = False,
    early: bool = False,
) -> torch.Tensor:
    """Adds x to residual in place, rounded to its dtype; returns the norm of the rounded sum.
    Shapes and `early` as in `rms_norm`."""
    out = torch.empty_like(x) if out is None else out
    _launch(x, residual, weight, eps, out, has_residual=True, dependent=dependent, early=early)
    return out


def rounded_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounds_to: Rounding,
    *,
    dependent: bool = False,
) -> RoundedTokens:
    """Like `rms_norm`, its result rounded once more, as by `round_tokens`."""
    out = RoundedTokens.empty(x.shape[0], x.shape[1], rounds_to, x.device)
    _launch(x, x, weight, eps, out, has_residual=False, dependent=dependent, early=True)
    return out


def rounded_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounds_to: Rounding,
    *,
    dependent: bool = False,
) -> RoundedTokens:
    """Like `add_rms_norm`, its result rounded once more, as by `round_tokens`."""
    out = RoundedTokens.empty(x.shape[0], x.shape[1], rounds_to, x.device)
    _launch(x, residual, weight, eps, out, has_residual=True, dependent=dependent, early=True)
    return out


def rms_norm_twin(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in plain torch, in x's precision or float32, whichever is higher; not rounded."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | RoundedTokens,
    *,
    has_residual: bool,
    dependent: bool,
    early: bool,
) -> None:
    num_tokens, hidden = x.shape
    values, scales = out if isinstance(out, RoundedTokens) else (out, None)
    assert x.stride(1) == residual.stride(1) == values.stride(1) == 1
    block = triton.next_power_of_2(hidden)
    # One program a row: a row's bits are its own.
    _rms_norm[(num_tokens,)](
        x,
        residual,
        weight,
        values,
        scales,
        x.stride(0),
        residual.stride(0),
        values.stride(0),
        hidden,
        eps,
        num_tokens,
        BLOCK=block,
        HAS_RESIDUAL=has_residual,
        DEPENDENT=dependent,
        EARLY=hidden <= EARLY_HIDDEN or (early and num_tokens <= EARLY_TOKENS),
        MOST=0.0 if scales is None else MOST[values.dtype],
        SHARED=0 if scales is None or scales.ndim == 1 else hidden // len(scales),
        num_warps=norm_warps(hidden),
        **launch_options(dependent),
    )


def norm_warps(hidden: int) -> int:
    """Warps of a program, by the width alone: a row's bits depend on it."""
    num_warps: int = triton.next_power_of_2(hidden) // 512
    return min(max(num_warps, 1), 16)


@triton.jit(do_not_specialize=["num_tokens"])
def _rms_norm(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_scales,
    stride_x,
    stride_residual,
    stride_out,
    hidden,
    eps,
    num_tokens,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
    MOST: tl.constexpr,
    SHARED: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    inside = o_h < hidden
    b_weight = tl.load(p_weight + o_h, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    b_x = tl.load(p_x + i_token * stride_x + o_h, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        p_sum = p_residual + i_token * stride_residual + o_h
        b_sum = b_x.to(tl.float32) + tl.load(p_sum, mask=inside, other=0.0).to(tl.float32)
        b_x = b_sum.to(p_residual.dtype.element_ty)
        tl.store(p_sum, b_x, mask=inside)
    if not EARLY:
        release_dependents(DEPENDENT)
    b_x = b_x.to(tl.float32)
    variance = tl.sum(b_x * b_x, axis=0) / hidden
    b_y = b_x * tl.rsqrt(variance + eps) * b_weight
    # Threads hold as many neighbouring values as they store at once, and sum in that order: eight
    # here too, although 16 bytes hold 16 rounded values, so that a rounded norm has the same bits
    # as a stored one.
    p_y = p_out + i_token * stride_out + tl.max_contiguous(tl.arange(0, BLOCK), 8)
    if MOST > 0:
        # Rounded as a norm that is stored.
        b_y = b_y.to(p_x.dtype.element_ty).to(tl.float32)
        store_rounded(b_y, p_y, p_scales, i_token, num_tokens, inside, hidden, MOST, SHARED)
    else:
        tl.store(p_y, b_y.to(p_out.dtype.element_ty), mask=inside)
