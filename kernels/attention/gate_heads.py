"""Results of attention times the sigmoid of gates. Source: Qiu et al., "Gated attention for large
language models", 2025."""

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

BLOCK = 1024


def gate_heads(
    attended: torch.Tensor, gates: torch.Tensor, *, dependent: bool = False
) -> torch.Tensor:
    """attended [T, Hq D] and gates [T, Hq, D], whose heads may lie apart → [T, Hq D]; the sigmoid
    is rounded as one that is stored. With `dependent`, the previous kernel may still be writing
    attended."""
    num_tokens, width = attended.shape
    assert attended.is_contiguous()
    assert gates.stride(2) == 1
    out = torch.empty_like(attended)
    if num_tokens:
        block = min(BLOCK, triton.next_power_of_2(width))
        _gate_heads[(num_tokens, triton.cdiv(width, block))](
            attended,
            gates,
            out,
            width,
            *gates.stride()[:2],
            HEAD_DIM=gates.shape[2],
            BLOCK=block,
            DEPENDENT=dependent,
            EARLY=num_tokens <= EARLY_TOKENS,
            num_warps=4,
            **launch_options(dependent),
        )
    return out


def gate_heads_twin(attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """`gate_heads` in plain torch."""
    return attended * gates.flatten(1).sigmoid()


@triton.jit
def _gate_heads(
    p_x,
    p_gates,
    p_out,
    width,
    stride_token,
    stride_head,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < width
    o_gate = o_i // HEAD_DIM * stride_head + o_i % HEAD_DIM
    if EARLY:
        # The product that is launched behind it reads its weights meanwhile.
        release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    if not EARLY:
        release_dependents(DEPENDENT)
    dtype: tl.constexpr = p_out.dtype.element_ty
    b_gate = tl.load(p_gates + i_token * stride_token + o_gate, mask=inside, other=0.0)
    b_share = (1 / (1 + tl.exp(-b_gate.to(tl.float32)))).to(dtype).to(tl.float32)
    b_x = tl.load(p_x + i_token * width + o_i, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_out + i_token * width + o_i, (b_x * b_share).to(dtype), mask=inside)
