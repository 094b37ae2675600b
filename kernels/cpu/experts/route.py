"""Experts of each token, and their weights, on a CPU. Of equal scores the smaller index comes
first."""

from __future__ import annotations

from typing import Any

import torch
from numba import njit

from ..compiler.compiled import Kernel, address_of, argument, float_bits, items
from ..compiler.scalars import float32_at, number_at, put, put_int32, size_of
from ..compiler.simd import add, div, highest_of, load, maximum, splat, store, sub, sum_of
from ..compiler.simd_math import exp
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES

_NOTHING = F32(float("nan"))
"""Score of an expert, or of a group, that is chosen or may not be."""
_LEAST = F32(float("-inf"))
_SIZE = 4
"""Bytes of a score."""


def route(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    is_sigmoid: bool,
    is_normalized: bool,
    scale: float,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    num_groups: int,
    num_chosen_groups: int,
    num_group_scores: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E], contiguous → experts int32 [T, k] in the order in which they are chosen, and
    weights float32 [T, k]. bias, of the logits' type, and correction float32 [E]. A group counts as
    the sum of so many largest scores, 1 or 2."""
    assert logits.is_contiguous()
    assert bias is None or bias.dtype == logits.dtype
    num_tokens, num_experts = logits.shape
    width = -(-num_experts // NUM_LANES) * NUM_LANES
    scratch = torch.empty(num_tokens, 2 * width + num_groups, dtype=torch.float32)
    experts = torch.empty(num_tokens, num_chosen, dtype=torch.int32)
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32)
    KERNEL(
        logits.dtype,
        num_tokens,
        num_chosen * logits.numel(),
        *(logits.data_ptr(), 0 if correction is None else correction.data_ptr()),
        *(scratch.data_ptr(), experts.data_ptr(), weights.data_ptr()),
        *(num_experts, width, num_chosen, int(is_sigmoid), int(is_normalized), float_bits(scale)),
        *(num_groups, num_chosen_groups),
        0 if bias is None else bias.data_ptr(),
        num_group_scores,
    )
    return experts, weights


@njit
def _softmax(p_scores: int, width: int) -> None:
    """Scores in the place of logits; those after the last are minus infinity."""
    highest = splat(_LEAST)
    for at in range(0, width, NUM_LANES):
        highest = maximum(highest, load(p_scores + at * _SIZE, F32_ELEMENT))
    top = splat(highest_of(highest))
    total = splat(F32(0))
    for at in range(0, width, NUM_LANES):
        part = exp(sub(load(p_scores + at * _SIZE, F32_ELEMENT), top))
        store(p_scores + at * _SIZE, part, F32_ELEMENT)
        total = add(total, part)
    whole = splat(sum_of(total))
    for at in range(0, width, NUM_LANES):
        part = load(p_scores + at * _SIZE, F32_ELEMENT)
        store(p_scores + at * _SIZE, div(part, whole), F32_ELEMENT)


@njit
def _sigmoid(p_scores: int, width: int) -> None:
    one = splat(F32(1))
    for at in range(0, width, NUM_LANES):
        logit = load(p_scores + at * _SIZE, F32_ELEMENT)
        score = div(one, add(one, exp(sub(splat(F32(0)), logit))))
        store(p_scores + at * _SIZE, score, F32_ELEMENT)


@njit
def _take_best(p_scores: int, count: int, default: int) -> int:
    """Index of the largest score, the first of equal ones, which is none afterwards. `default`
    where there is none."""
    best = default
    highest = _NOTHING
    for i in range(count):
        score = float32_at(p_scores + i * _SIZE)
        # Comparisons with no number are false.
        if score > highest or (score == score and highest != highest):  # noqa: PLR0124
            best = i
            highest = score
    put(p_scores + best * _SIZE, _NOTHING, F32_ELEMENT)
    return best


@njit
def _leave_groups(
    p_ranked: int,
    p_groups: int,
    num_experts: int,
    num_groups: int,
    num_chosen: int,
    num_scores: int,
) -> None:
    """Takes the scores of experts away that are in no chosen group."""
    size = num_experts // num_groups
    for group in range(num_groups):
        first = _LEAST
        second = _LEAST
        for i in range(group * size, (group + 1) * size):
            score = float32_at(p_ranked + i * _SIZE)
            if score > first:
                second = first
                first = score
            elif score > second:
                second = score
        total = first + second if num_scores > 1 else first
        put(p_groups + group * _SIZE, total, F32_ELEMENT)
    for i in range(num_chosen):
        _take_best(p_groups, num_groups, i)
    for group in range(num_groups):
        score = float32_at(p_groups + group * _SIZE)
        if score == score:  # noqa: PLR0124
            for i in range(group * size, (group + 1) * size):
                put(p_ranked + i * _SIZE, _NOTHING, F32_ELEMENT)


@njit
def _route_row(arguments: int, row: int, element: Any) -> None:
    num_experts = argument(arguments, 5)
    width = argument(arguments, 6)
    num_chosen = argument(arguments, 7)
    num_groups = argument(arguments, 11)
    p_logits = argument(arguments, 0) + row * num_experts * size_of(element)
    p_correction = argument(arguments, 1)
    p_bias = argument(arguments, 13)
    p_scores = argument(arguments, 2) + row * (2 * width + num_groups) * _SIZE
    p_ranked = p_scores + width * _SIZE
    for i in range(num_experts):
        logit = number_at(p_logits + i * size_of(element), element)
        if p_bias:
            logit += number_at(p_bias + i * size_of(element), element)
        put(p_scores + i * _SIZE, logit, F32_ELEMENT)
    for i in range(num_experts, width):
        put(p_scores + i * _SIZE, _LEAST, F32_ELEMENT)
    if argument(arguments, 8):
        _sigmoid(p_scores, width)
    else:
        _softmax(p_scores, width)
    for i in range(num_experts):
        score = float32_at(p_scores + i * _SIZE)
        if p_correction:
            score += float32_at(p_correction + i * _SIZE)
        put(p_ranked + i * _SIZE, score, F32_ELEMENT)
    if num_groups > 1:
        p_groups = p_ranked + width * _SIZE
        _leave_groups(
            p_ranked,
            p_groups,
            num_experts,
            num_groups,
            argument(arguments, 12),
            argument(arguments, 14),
        )
    p_experts = argument(arguments, 3) + row * num_chosen * _SIZE
    p_weights = argument(arguments, 4) + row * num_chosen * _SIZE
    total = F32(0)
    for place in range(num_chosen):
        expert = _take_best(p_ranked, num_experts, place)
        score = float32_at(p_scores + expert * _SIZE)
        total += score
        put_int32(p_experts + place * _SIZE, expert)
        put(p_weights + place * _SIZE, score, F32_ELEMENT)
    if not argument(arguments, 9):
        total = F32(1)
    scale = float32_at(address_of(arguments, 10))
    for place in range(num_chosen):
        p_weight = p_weights + place * _SIZE
        put(p_weight, float32_at(p_weight) / total * scale, F32_ELEMENT)


def _rows(element: Any) -> Any:
    def work(arguments: int) -> None:
        for row in items(arguments):
            _route_row(arguments, row, element)

    return work


KERNEL = Kernel(_rows(F32_ELEMENT), _rows(BF16_ELEMENT))
