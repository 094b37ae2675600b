"""SiLU, or GELU in its approximation by tanh, of the gate times the up projection."""

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

BLOCK = 1024


CLAMP = tl.constexpr(7.0)
SIGMOID_SCALE = tl.constexpr(1.702)
"""Bound of gates and ups of the clamped SwiGLU, and the factor in its sigmoid."""
GELU_LINEAR = tl.constexpr(1.5957691216057308)
GELU_CUBIC = tl.constexpr(0.07135481282052724)
"""2 sqrt(2 / pi), and 0.044715 times as much."""


def silu_mul(
    gate_up: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dependent: bool = False,
    early: bool = False,
) -> torch.Tensor:
    """SiLU of the gate times the up projection: gate_up [T, 2 I], the gate in the first half of a
    row; returns out [T, I]. `early`: the product that reads it fills rings with weights."""
    return _launch(gate_up, out, is_gelu=False, dependent=dependent, early=early)


def gelu_tanh_mul(
    gate_up: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dependent: bool = False,
    early: bool = False,
) -> torch.Tensor:
    """GELU of the gate times the up projection; shapes and `early` as in `silu_mul`."""
    return _launch(gate_up, out, is_gelu=True, dependent=dependent, early=early)


def _launch(
    gate_up: torch.Tensor, out: torch.Tensor | None, *, is_gelu: bool, dependent: bool, early: bool
) -> torch.Tensor:
    num_tokens = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(num_tokens, width) if out is None else out
    grid = (num_tokens, triton.cdiv(width, BLOCK))
    _activate_mul[grid](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        width,
        BLOCK=BLOCK,
        GELU=is_gelu,
        DEPENDENT=dependent,
        EARLY=early and num_tokens <= EARLY_TOKENS,
        num_warps=4,
        **launch_options(dependent),
    )
    return out


def rounded_mul(
    gate_up: torch.Tensor, rounds_to: Rounding, *, is_gelu: bool, dependent: bool = False
) -> RoundedTokens:
    """Like `silu_mul` or `gelu_tanh_mul`, its result rounded once more, as by `round_tokens`."""
    num_tokens = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = RoundedTokens.empty(num_tokens, width, rounds_to, gate_up.device)
    block = triton.next_power_of_2(width)
    _activate_mul_round[(num_tokens,)](
        gate_up,
        *out,
        gate_up.stride(0),
        width,
        num_tokens,
        MOST=MOST[rounds_to.dtype],
        SHARED=rounds_to.group,
        BLOCK=block,
        GELU=is_gelu,
        DEPENDENT=dependent,
        EARLY=num_tokens <= EARLY_TOKENS,
        num_warps=min(max(block // 1024, 1), 32),
        **launch_options(dependent),
    )
    return out


GATES = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
"""Keyed by the activation of gates."""


def silu_mul_twin(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` in plain torch, in float32 or better; not rounded."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_tanh_mul_twin(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu_tanh_mul` in plain torch, in float32 or better; not rounded."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def clamped_swiglu_twin(gate_up: torch.Tensor) -> torch.Tensor:
    """g / (1 + exp(-1.702 g)) * (u + 1) of a gate g that is at most 7 and an up u between -7 and 7,
    in plain torch, in float32 or better; not rounded. Source: OpenAI, "gpt-oss", 2025."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    gate = gate.clamp(max=CLAMP.value)
    return (
        gate * torch.sigmoid(SIGMOID_SCALE.value * gate) * (up.clamp(-CLAMP.value, CLAMP.value) + 1)
    )


@triton.jit
def gated(b_gate, b_up):
    return b_gate / (1.0 + tl.exp(-b_gate)) * b_up


@triton.jit
def gelu_gated(b_gate, b_up):
    """x (1 + tanh u) / 2, computed as x / (1 + exp(-2 u))."""
    return b_gate / (1.0 + tl.exp(-b_gate * (GELU_LINEAR + GELU_CUBIC * b_gate * b_gate))) * b_up


@triton.jit
def _activate_mul(
    p_gate_up,
    p_out,
    stride_in,
    stride_out,
    width,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < width
    if EARLY:
        release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    b_gate = tl.load(p_gate_up + i_token * stride_in + o_i, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + i_token * stride_in + width + o_i, mask=inside, other=0.0).to(
        tl.float32
    )
    if not EARLY:
        release_dependents(DEPENDENT)
    b_y = gelu_gated(b_gate, b_up) if GELU else gated(b_gate, b_up)
    tl.store(p_out + i_token * stride_out + o_i, b_y.to(p_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _activate_mul_round(
    p_gate_up,
    p_values,
    p_scales,
    stride_in,
    width,
    num_tokens,
    MOST: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, BLOCK)
    inside = o_i < width
    if EARLY:
        release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    b_gate = tl.load(p_gate_up + i_token * stride_in + o_i, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + i_token * stride_in + width + o_i, mask=inside, other=0.0).to(
        tl.float32
    )
    if not EARLY:
        release_dependents(DEPENDENT)
    b_y = gelu_gated(b_gate, b_up) if GELU else gated(b_gate, b_up)
    # Rounded as a product that is stored.
    b_y = b_y.to(p_gate_up.dtype.element_ty).to(tl.float32)
    p_y = p_values + i_token * width + o_i
    store_rounded(b_y, p_y, p_scales, i_token, num_tokens, inside, width, MOST, SHARED)
