"""LayerNorm of a sum: a product, its bias, and the residual stream. Source: Ba et al., "Layer
normalization", 2016."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_WIDTH = 16_384
"""Widest rows that a program keeps in registers."""


def add_layer_norm(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """LayerNorm of x [T, H] + bias [H] + residual [T, H] by weight and norm_bias [H], written over
    residual, which is returned. Sums stay in float32; the result alone is rounded."""
    num_tokens, width = x.shape
    assert x.is_contiguous()
    assert residual.is_contiguous()
    assert width <= MAX_WIDTH
    _add_layer_norm[(num_tokens,)](
        x,
        bias,
        residual,
        weight,
        norm_bias,
        eps,
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8,
    )
    return residual


def add_layer_norm_twin(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The same in plain torch, in float64; not rounded, and residual stays as it is."""
    total = x.double() + bias.double() + residual.double()
    return torch.nn.functional.layer_norm(
        total, weight.shape, weight.double(), norm_bias.double(), eps
    )


@triton.jit
def _add_layer_norm(
    p_x, p_bias, p_residual, p_weight, p_norm_bias, eps, width, BLOCK: tl.constexpr
):
    o_i = tl.arange(0, BLOCK)
    inside = o_i < width
    at = tl.program_id(0).to(tl.int64) * width + o_i
    b_sum = tl.load(p_x + at, mask=inside, other=0.0).to(tl.float32)
    b_sum += tl.load(p_bias + o_i, mask=inside, other=0.0).to(tl.float32)
    b_sum += tl.load(p_residual + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(b_sum, 0) / width
    b_centered = tl.where(inside, b_sum - mean, 0.0)
    scale = tl.rsqrt(tl.sum(b_centered * b_centered, 0) / width + eps)
    b_weight = tl.load(p_weight + o_i, mask=inside, other=0.0).to(tl.float32)
    b_bias = tl.load(p_norm_bias + o_i, mask=inside, other=0.0).to(tl.float32)
    b_out = b_centered * scale * b_weight + b_bias
    tl.store(p_residual + at, b_out.to(p_residual.dtype.element_ty), mask=inside)
