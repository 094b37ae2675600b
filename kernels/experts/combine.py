"""Adds the outputs of each token's experts, each times its weight, in float32 and in routing order;
the sum is rounded once. Also copies tokens to the rows of their experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs

BLOCK = 1024


def combine(
    y: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    places: torch.Tensor | None = None,
    *,
    experts: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    dependent: bool = False,
) -> None:
    """Writes the sums to out [T, H]: outputs y [rows, H], weights float32 [T, k]. `places`
    int32 [T k]: the row of each pair; None: rows are in the order of pairs. With experts
    int32 [T, k], pairs of expert −1 count for nothing, and biases [E, H] of the pairs' experts are
    added to the outputs in float32."""
    assert biases is None or experts is not None
    assert y.is_contiguous()
    assert out.is_contiguous()
    num_tokens, width = out.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    _combine[(num_tokens, triton.cdiv(width, block))](
        y,
        weights,
        out,
        places,
        experts,
        biases,
        width,
        CHOSEN=weights.shape[1],
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4,
        **launch_options(dependent),
    )


def combine_twin(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums [T, H] of y [T, k, H] in plain torch, in float32 or better; not rounded."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    return (y.to(dtype) * weights.to(dtype)[:, :, None]).sum(1)


def copy_tokens(
    x: torch.Tensor, out: torch.Tensor, places: torch.Tensor, *, dependent: bool = False
) -> None:
    """Copies x [T, H] to the rows of out [rows, H] that `places` int32 [T k] names; −1: to
    none."""
    assert x.stride(1) == 1
    assert out.is_contiguous()
    num_tokens, width = x.shape
    block = triton.next_power_of_2(width)
    _copy_tokens[(num_tokens,)](
        x,
        out,
        places,
        x.stride(0),
        width,
        CHOSEN=len(places) // num_tokens,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=min(max(block // 1024, 1), 8),
        **launch_options(dependent),
    )


@triton.jit
def add_weighted(b_sum, weight, b_y):
    """Adds a weighted product with one rounding, so that every kernel that adds has the same
    bits."""
    return tl.fma(b_y.to(tl.float32), weight, b_sum)


@triton.jit
def load_outputs(p_y, p_places, p_experts, p_biases, i_pair, o_i, inside, width):
    """Outputs of a pair with the bias of its expert; zeros of expert −1."""
    i_row = i_pair if p_places is None else tl.load(p_places + i_pair).to(tl.int64)
    if p_experts is not None:
        expert = tl.load(p_experts + i_pair).to(tl.int64)
        inside = inside & (expert >= 0)
    b_y = tl.load(p_y + i_row * width + o_i, mask=inside, other=0.0)
    if p_biases is not None:
        b_bias = tl.load(p_biases + expert * width + o_i, mask=inside, other=0.0)
        b_y = b_y.to(tl.float32) + b_bias.to(tl.float32)
    return b_y


@triton.jit
def _combine(
    p_y,
    p_weights,
    p_out,
    p_places,
    p_experts,
    p_biases,
    width,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < width
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN):
        i_pair = i_token * CHOSEN + i
        b_y = load_outputs(p_y, p_places, p_experts, p_biases, i_pair, o_i, inside, width)
        b_sum = add_weighted(b_sum, tl.load(p_weights + i_pair), b_y)
    tl.store(p_out + i_token * width + o_i, b_sum.to(p_out.dtype.element_ty), mask=inside)


@triton.jit
def _copy_tokens(
    p_x,
    p_out,
    p_places,
    stride,
    width,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, BLOCK)
    inside = o_i < width
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    b_x = tl.load(p_x + i_token * stride + o_i, mask=inside)
    for i in tl.static_range(CHOSEN):
        i_row = tl.load(p_places + i_token * CHOSEN + i).to(tl.int64)
        tl.store(p_out + i_row * width + o_i, b_x, mask=inside & (i_row >= 0))
