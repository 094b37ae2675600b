"""The norm of each value head of a gated delta net, times the SiLU of its gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from .delta_arguments import DeltaLayer

HEADS = 4
"""Number of heads of a program; fixed, so that the layout of a reduction never depends on the
batch."""


def gated_norm(
    x: torch.Tensor, wide: torch.Tensor, layer: DeltaLayer, *, dependent: bool = False
) -> torch.Tensor:
    """Outputs [T, value heads · value_dim] of value heads, in place; gates are in the wide
    projection [T, …]. `dependent`: as in `delta_net`."""
    unit = layer.unit
    num_values = layer.num_heads * unit.num_values
    _gated_norm[(len(x), triton.cdiv(num_values, HEADS))](
        x,
        wide,
        layer.norm,
        layer.eps,
        x.stride(0),
        wide.stride(0),
        *layer.places.z,
        num_values,
        NUM_VALUES=unit.num_values,
        VALUE_DIM=unit.value_dim,
        HEADS=HEADS,
        DEPENDENT=dependent,
        num_warps=1,
        **launch_options(dependent),
    )
    return x


@triton.jit
def _gated_norm(
    p_x,
    p_wide,
    p_norm,
    eps,
    stride_x,
    stride_wide,
    z_first,
    z_stride,
    num_values,
    NUM_VALUES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    i_token = tl.program_id(0).to(tl.int64)
    o_value = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    o_d = tl.arange(0, VALUE_DIM)
    inside = (o_value < num_values)[:, None]
    o_z = z_first + o_value // NUM_VALUES * z_stride + o_value % NUM_VALUES * VALUE_DIM
    p_own = p_x + i_token * stride_x + o_value[:, None] * VALUE_DIM + o_d[None, :]
    p_z = p_wide + i_token * stride_wide + o_z[:, None] + o_d[None, :]
    b_x = tl.load(p_own, mask=inside, other=0.0).to(tl.float32)
    b_z = tl.load(p_z, mask=inside, other=0.0).to(tl.float32)
    b_x = gated(b_x, b_z, tl.load(p_norm + o_d), eps)
    tl.store(p_own, b_x.to(p_x.dtype.element_ty), mask=inside)


@triton.jit
def gated(b_x, b_z, b_norm, eps):
    """Norms of heads [heads, value_dim] times the SiLU of gates, in float32."""
    b_factor = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / b_x.shape[1] + eps)[:, None]
    return b_x * b_factor * b_norm[None, :] * (b_z / (1 + tl.exp(-b_z)))
