"""The clamped SwiGLU of rows of experts, whose products have biases. Source: OpenAI, "gpt-oss",
2025."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from ..norm.silu_mul import CLAMP, SIGMOID_SCALE

BLOCK = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBiases:
    """Biases of the products of experts whose gate is the clamped SwiGLU."""

    gate_up: torch.Tensor
    """[E, 2 I]"""
    down: torch.Tensor
    """[E, H]"""


def clamped_gate(
    products: torch.Tensor,
    experts: torch.Tensor,
    biases: torch.Tensor,
    out: torch.Tensor,
    places: torch.Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Writes `clamped_swiglu_twin` of products [rows, 2 I], gates first, with the biases [E, 2 I]
    of their experts int32 [T, k], to out [rows, I]. `places` int32 [T k]: the row of each pair;
    None: rows are in the order of pairs. Rows of expert −1 are not written. With `dependent`, the
    previous kernel may still be writing products, and nothing else that is read here."""
    num_pairs = experts.numel()
    width = out.shape[1]
    assert products.is_contiguous()
    assert out.is_contiguous()
    assert biases.is_contiguous()
    block = min(BLOCK, triton.next_power_of_2(width))
    _clamped_gate[(num_pairs, triton.cdiv(width, block))](
        products,
        experts,
        biases,
        out,
        places,
        width,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4,
        **launch_options(dependent),
    )


@triton.jit
def clamped(b_gate, b_up):
    b_gate = tl.minimum(b_gate, CLAMP)
    b_up = tl.maximum(tl.minimum(b_up, CLAMP), -CLAMP)
    return b_gate / (1.0 + tl.exp(-SIGMOID_SCALE * b_gate)) * (b_up + 1.0)


@triton.jit
def _clamped_gate(
    p_products,
    p_experts,
    p_biases,
    p_out,
    p_places,
    width,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_pair = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(p_experts + i_pair).to(tl.int64)
    inside = (o_i < width) & (expert >= 0)
    p_bias = p_biases + expert * 2 * width + o_i
    b_gate_bias = tl.load(p_bias, mask=inside, other=0.0).to(tl.float32)
    b_up_bias = tl.load(p_bias + width, mask=inside, other=0.0).to(tl.float32)
    i_row = i_pair if p_places is None else tl.load(p_places + i_pair).to(tl.int64)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    p_row = p_products + i_row * 2 * width + o_i
    b_gate = tl.load(p_row, mask=inside, other=0.0).to(tl.float32) + b_gate_bias
    b_up = tl.load(p_row + width, mask=inside, other=0.0).to(tl.float32) + b_up_bias
    b_y = clamped(b_gate, b_up)
    tl.store(p_out + i_row * width + o_i, b_y.to(p_out.dtype.element_ty), mask=inside)
