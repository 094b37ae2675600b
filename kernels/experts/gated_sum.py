"""The sum of a token's experts and of its shared expert, times the sigmoid of a product of its own,
in float32; the sum is rounded once. A program computes one token, so its bits do not depend on the
other tokens of a batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs

NUM_WARPS = 4
"""Fixed, so that `row_sums` adds the products of a share in the same order."""


def gated_sum(
    out: torch.Tensor,
    shared: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    *,
    dependent: bool = False,
) -> torch.Tensor:
    """out + sigmoid(x · gate) shared, [T, H]: sums of experts out [T, H], shared experts [T, H],
    tokens x [T, H] and gate [1, H]."""
    num_tokens, width = out.shape
    assert x.stride(1) == out.stride(1) == shared.stride(1) == 1
    assert gate.is_contiguous()
    made = out.new_empty(num_tokens, width)
    if num_tokens:
        block = triton.next_power_of_2(width)
        _gated_sum[(num_tokens,)](
            out,
            shared,
            x,
            gate,
            made,
            out.stride(0),
            shared.stride(0),
            x.stride(0),
            width,
            BLOCK=block,
            DEPENDENT=dependent,
            num_warps=NUM_WARPS,
            **launch_options(dependent),
        )
    return made


def gated_sum_twin(
    out: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """`gated_sum` in plain torch, in float64."""
    return out.double() + (x.double() @ gate.double().t()).sigmoid() * shared.double()


@triton.jit
def share_of(p_x, inside, b_gate):
    """The share of a token's shared expert: the sigmoid of x · gate."""
    b_x = tl.load(p_x, mask=inside, other=0.0).to(tl.float32)
    return 1 / (1 + tl.exp(-tl.sum(b_x * b_gate, axis=0)))


@triton.jit
def add_shared(b_out, b_shared, share):
    return tl.fma(b_shared.to(tl.float32), share, b_out.to(tl.float32))


@triton.jit
def _gated_sum(
    p_out,
    p_shared,
    p_x,
    p_gate,
    p_made,
    stride_out,
    stride_shared,
    stride_x,
    width,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, BLOCK)
    inside = o_i < width
    b_gate = tl.load(p_gate + o_i, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    share = share_of(p_x + i_token * stride_x + o_i, inside, b_gate)
    b_shared = tl.load(p_shared + i_token * stride_shared + o_i, mask=inside, other=0.0)
    b_out = tl.load(p_out + i_token * stride_out + o_i, mask=inside, other=0.0)
    b_out = add_shared(b_out, b_shared, share)
    tl.store(p_made + i_token * width + o_i, b_out.to(p_made.dtype.element_ty), mask=inside)
