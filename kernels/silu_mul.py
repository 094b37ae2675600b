"""SiLU of the gate times the up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headwater.kernels.dependent_launch import launch_options, release_dependents, wait_for_inputs

BLOCK = 1024


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None, *, dependent: bool = False) -> torch.Tensor:
    """gate_up [T, 2 I], the gate in the first half of a row; returns out [T, I]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(num_tokens, width) if out is None else out
    grid = (num_tokens, triton.cdiv(width, BLOCK))
    _silu_mul[grid](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        width,
        BLOCK=BLOCK,
        DEPENDENT=dependent,
        num_warps=4,
        **launch_options(dependent),
    )
    return out


def silu_mul_twin(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in plain torch, in float32 or better; not rounded."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@triton.jit
def gated(b_gate, b_up):
    return b_gate / (1.0 + tl.exp(-b_gate)) * b_up


@triton.jit
def _silu_mul(p_gate_up, p_out, stride_in, stride_out, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < width
    wait_for_inputs(DEPENDENT)
    b_gate = tl.load(p_gate_up + i_token * stride_in + o_i, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + i_token * stride_in + width + o_i, mask=inside, other=0.0).to(tl.float32)
    release_dependents(DEPENDENT)
    tl.store(p_out + i_token * stride_out + o_i, gated(b_gate, b_up).to(p_out.dtype.element_ty), mask=inside)
