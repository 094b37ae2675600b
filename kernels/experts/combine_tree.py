"""Adds the outputs of each token's experts in equal groups of experts, and the groups in a tree, so
that ranks that have some of the groups add up to the bits of one that has all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..gemm.tree_sum import tree_sum
from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from .combine import add_weighted, load_outputs

BLOCK = 512


def combine_tree(
    y: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    places: torch.Tensor | None,
    experts: torch.Tensor,
    num_experts: int,
    num_leaves: int,
    *,
    biases: torch.Tensor | None = None,
    dependent: bool = False,
) -> None:
    """Like `combine`, to out float32 [T, H]: groups of num_experts / num_leaves experts are added
    in routing order, and the groups as `tree_sum` does. Their number is a power of two."""
    assert num_experts % num_leaves == 0
    assert out.dtype == torch.float32
    assert y.is_contiguous()
    assert out.is_contiguous()
    num_tokens, width = out.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    _combine_tree[(num_tokens, triton.cdiv(width, block))](
        y,
        weights,
        out,
        places,
        experts,
        biases,
        width,
        CHOSEN=weights.shape[1],
        LEAVES=num_leaves,
        LEAF_EXPERTS=num_experts // num_leaves,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4,
        **launch_options(dependent),
    )


def combine_tree_twin(
    y: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    num_leaves: int,
) -> torch.Tensor:
    """Sums float32 [T, H] of y [T, k, H] in plain torch; experts int32 [T, k], −1: its row counts
    for nothing."""
    leaves = experts * num_leaves // num_experts
    terms = y.float() * weights[:, :, None]
    sums = []
    for leaf in range(num_leaves):
        total = torch.zeros_like(terms[:, 0])
        for i in range(experts.shape[1]):
            is_own = ((leaves[:, i] == leaf) & (experts[:, i] >= 0))[:, None]
            total = torch.where(is_own, total + terms[:, i], total)
        sums.append(total)
    return tree_sum(sums)


@triton.jit
def _combine_tree(
    p_y,
    p_weights,
    p_out,
    p_places,
    p_experts,
    p_biases,
    width,
    CHOSEN: tl.constexpr,
    LEAVES: tl.constexpr,
    LEAF_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_leaf = tl.arange(0, LEAVES)[:, None]
    inside = o_i < width
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    b_sums = tl.zeros([LEAVES, BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN):
        i_pair = i_token * CHOSEN + i
        b_y = load_outputs(p_y, p_places, p_experts, p_biases, i_pair, o_i, inside, width)
        b_more = add_weighted(b_sums, tl.load(p_weights + i_pair), b_y[None, :])
        expert = tl.load(p_experts + i_pair)
        is_leaf = (expert >= 0) & (o_leaf == expert // LEAF_EXPERTS)
        b_sums = tl.where(is_leaf, b_more, b_sums)
    # Each sum is of two numbers, so there is no order in it.
    if LEAVES >= 8:
        b_sums = tl.sum(tl.reshape(b_sums, [LEAVES // 2, 2, BLOCK]), 1)
    if LEAVES >= 4:
        HALF: tl.constexpr = b_sums.shape[0] // 2
        b_sums = tl.sum(tl.reshape(b_sums, [HALF, 2, BLOCK]), 1)
    b_sum = tl.sum(b_sums, 0)
    tl.store(p_out + i_token * width + o_i, b_sum, mask=inside)
