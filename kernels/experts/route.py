"""Chooses the experts of each token from a router's logits. A program chooses for one token, so its
choice does not depend on the other tokens of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs

SIGN = tl.constexpr(0x7FFFFFFF)
"""All bits except the sign."""
LEAST = tl.constexpr(-0x80000000)
"""Key of what is no candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How experts are chosen: by score + correction, of equal ones the smaller index first. With
    groups of neighbouring experts, only the experts of the `num_chosen_groups` best groups are
    candidates; a group counts as the sum of its largest corrected scores."""

    num_chosen: int
    """Experts a token, k."""
    is_sigmoid: bool = False
    """Whether a score is the sigmoid of its logit; else it is the softmax over all experts."""
    is_normalized: bool = False
    """Whether weights are divided by their sum, which is added in routing order."""
    scale: float = 1.0
    """Factor of the weights, after the division."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_group_scores: int = 2
    """Largest scores of a group that are added, 1 or 2."""
    own: range | None = None
    """Experts that are numbered from 0; each other one is −1. None: all have their index."""


def route(
    logits: torch.Tensor,
    choice: Choice,
    correction: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    dependent: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns experts int32 [T, k] and weights float32 [T, k] in routing order, for logits [T, E]
    a correction float32 [E], and a bias [E] that is added to logits in float32. The number of
    tokens of each expert is added to counts int64 [E]."""
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    assert num_experts % choice.num_groups == 0
    experts = torch.empty(num_tokens, choice.num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(experts, dtype=torch.float32)
    _route[(num_tokens,)](
        logits,
        correction,
        bias,
        experts,
        weights,
        counts,
        logits.stride(0),
        choice.scale,
        NUM_EXPERTS=num_experts,
        CHOSEN=choice.num_chosen,
        GROUPS=choice.num_groups,
        CHOSEN_GROUPS=choice.num_chosen_groups,
        GROUP_SCORES=choice.num_group_scores,
        FIRST_OWN=-1 if choice.own is None else choice.own.start,
        NUM_OWN=0 if choice.own is None else len(choice.own),
        GROUP_BLOCK=triton.next_power_of_2(choice.num_groups),
        MEMBER_BLOCK=triton.next_power_of_2(num_experts // choice.num_groups),
        CHOSEN_BLOCK=triton.next_power_of_2(choice.num_chosen),
        SIGMOID=choice.is_sigmoid,
        NORMALIZED=choice.is_normalized,
        DEPENDENT=dependent,
        num_warps=1,
        **launch_options(dependent),
    )
    return experts, weights


def route_twin(
    logits: torch.Tensor,
    choice: Choice,
    correction: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` in plain torch; weights in the logits' dtype, float32 or better."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if bias is None else logits + bias
    scores = logits.sigmoid() if choice.is_sigmoid else logits.softmax(-1)
    corrected = scores if correction is None else scores + correction
    if choice.num_chosen_groups < choice.num_groups:
        grouped = corrected.view(len(logits), choice.num_groups, -1)
        of_groups = grouped.topk(choice.num_group_scores, dim=-1).values.sum(-1)
        best = _largest(of_groups, choice.num_chosen_groups)
        is_kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, best, True)
        corrected = grouped.masked_fill(~is_kept[:, :, None], -torch.inf).flatten(1)
    experts = _largest(corrected, choice.num_chosen)
    weights = scores.gather(1, experts)
    if choice.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    if choice.own is not None:
        is_own = (experts >= choice.own.start) & (experts < choice.own.stop)
        experts = (experts - choice.own.start).masked_fill(~is_own, -1)
    return experts.int(), weights * choice.scale


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest values of each row, of equal ones the smaller index first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@triton.jit
def _route(
    p_logits,
    p_correction,
    p_bias,
    p_experts,
    p_weights,
    p_counts,
    stride,
    scale,
    NUM_EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    FIRST_OWN: tl.constexpr,
    NUM_OWN: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    MEMBERS: tl.constexpr = NUM_EXPERTS // GROUPS
    i_token = tl.program_id(0).to(tl.int64)
    o_group = tl.arange(0, GROUP_BLOCK)
    o_member = tl.arange(0, MEMBER_BLOCK)
    o_expert = o_group[:, None] * MEMBERS + o_member[None, :]
    is_expert = (o_group < GROUPS)[:, None] & (o_member < MEMBERS)[None, :]
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    p_logits += i_token * stride
    b_logit = tl.load(p_logits + o_expert, mask=is_expert, other=-float("inf")).to(tl.float32)
    if p_bias is not None:
        b_logit += tl.load(p_bias + o_expert, mask=is_expert, other=0.0).to(tl.float32)
    if SIGMOID:
        b_score = 1.0 / (1.0 + tl.exp(-b_logit))
    else:
        best = tl.max(tl.max(b_logit, 1), 0)
        b_score = tl.exp(b_logit - tl.where(best == -float("inf"), 0.0, best))
        b_score = b_score / tl.sum(tl.sum(b_score, 1), 0)
    b_left = b_score
    if p_correction is not None:
        b_left += tl.load(p_correction + o_expert, mask=is_expert, other=0.0)
    b_left = tl.where(is_expert, b_left, -float("inf"))
    if CHOSEN_GROUPS < GROUPS:
        is_kept = _best_groups(b_left, o_group, o_member, CHOSEN_GROUPS, GROUP_SCORES)
        b_left = tl.where(is_kept[:, None], b_left, -float("inf"))
    o_chosen = tl.arange(0, CHOSEN_BLOCK)
    b_experts = tl.zeros([CHOSEN_BLOCK], tl.int32)
    b_weights = tl.zeros([CHOSEN_BLOCK], tl.float32)
    total = 0.0
    # A warp finds the largest of whole numbers in one instruction, of floats in five.
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_key = tl.where(is_expert, _ordered(b_left), LEAST)
    for i in tl.static_range(CHOSEN):
        best = tl.max(tl.max(b_key, 1), 0)
        # An expert that exists, even where a logit is the one number that equals LEAST.
        b_best = tl.where(b_key == best, o_expert, NUM_EXPERTS - 1)
        expert = tl.min(tl.min(b_best, 1), 0)
        is_chosen = (o_expert == expert) & is_expert
        bits = tl.sum(tl.sum(tl.where(is_chosen, b_bits, 0), 1), 0)
        weight = bits.to(tl.float32, bitcast=True)
        total += weight
        b_experts = tl.where(o_chosen == i, expert, b_experts)
        b_weights = tl.where(o_chosen == i, weight, b_weights)
        b_key = tl.where(is_chosen, LEAST, b_key)
    if NORMALIZED:
        b_weights = b_weights / tl.where(total == 0.0, 1.0, total)
    if p_counts is not None:
        is_choice = o_chosen < CHOSEN
        b_one = tl.zeros_like(b_experts).to(tl.int64) + 1
        tl.atomic_add(p_counts + b_experts, b_one, mask=is_choice, sem="relaxed")
    if FIRST_OWN >= 0:
        b_own = b_experts - FIRST_OWN
        b_experts = tl.where((b_own >= 0) & (b_own < NUM_OWN), b_own, -1)
    o_out = i_token * CHOSEN + o_chosen
    tl.store(p_experts + o_out, b_experts, mask=o_chosen < CHOSEN)
    tl.store(p_weights + o_out, b_weights * scale, mask=o_chosen < CHOSEN)


@triton.jit
def _ordered(b_x):
    """Numbers float32 as int32 in the same order."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & SIGN)


@triton.jit
def _best_groups(b_value, o_group, o_member, COUNT: tl.constexpr, SCORES: tl.constexpr):
    """Whether each group is one of the COUNT whose SCORES largest values have the largest sums."""
    b_first = tl.max(b_value, 1)
    b_left = b_first
    if SCORES > 1:
        b_at = tl.min(tl.where(b_value == b_first[:, None], o_member[None, :], b_value.shape[1]), 1)
        b_others = tl.where(o_member[None, :] == b_at[:, None], -float("inf"), b_value)
        b_left += tl.max(b_others, 1)
    is_kept = o_group < 0
    for _ in tl.static_range(COUNT):
        best = tl.min(tl.where(b_left == tl.max(b_left, 0), o_group, b_value.shape[0]), 0)
        is_kept = is_kept | (o_group == best)
        b_left = tl.where(o_group == best, -float("inf"), b_left)
    return is_kept
