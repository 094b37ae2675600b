from __future__ import annotations

import pytest
import torch

from headwater.kernels.experts.route import Choice, route, route_twin
from tests.kernels.paging import GPU

SOFTMAX = Choice(num_chosen=4, is_normalized=True)
CHOICES = {
    "softmax": Choice(num_chosen=3),
    "normalized": SOFTMAX,
    "sigmoid": Choice(num_chosen=4, is_sigmoid=True, is_normalized=True, scale=2.5),
    "groups": Choice(
        num_chosen=4, is_sigmoid=True, is_normalized=True, num_groups=5, num_chosen_groups=2
    ),
    "groups by their best": Choice(
        num_chosen=4, num_groups=5, num_chosen_groups=2, num_group_scores=1
    ),
    "one": Choice(num_chosen=1, is_sigmoid=True),
}


def shuffled(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Logits with distinct scores in each row."""
    rows = [
        torch.randperm(shape[1], generator=generator, device=generator.device)
        for _ in range(shape[0])
    ]
    return torch.stack(rows) * (8 / shape[1]) - 4


@pytest.mark.parametrize("has_correction", [False, True])
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("num_experts", [20, pytest.param(160, marks=GPU)])
def test_a_choice_agrees_with_plain_torch(
    name: str, num_experts: int, has_correction: bool, generator: torch.Generator
) -> None:
    choice = CHOICES[name]
    logits = shuffled((6, num_experts), generator)
    correction = None
    if has_correction:
        correction = torch.rand(num_experts, generator=generator, device=generator.device)
    experts, weights = route(logits, choice, correction)
    expected, expected_weights = route_twin(logits.double(), choice, correction)
    assert torch.equal(experts, expected)
    assert torch.allclose(weights.double(), expected_weights, rtol=1e-5)


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_the_smaller_index_of_equal_scores_comes_first(
    is_sigmoid: bool, device: torch.device
) -> None:
    logits = torch.tensor([[0.0, 2, 1, 2, 1, 2, 1, 1], [1.0] * 8], device=device)
    choice = Choice(num_chosen=5, is_sigmoid=is_sigmoid)
    experts, _ = route(logits, choice)
    assert experts.tolist() == [[1, 3, 5, 2, 4], [0, 1, 2, 3, 4]]


def test_a_bias_is_added_to_logits_before_they_are_scores(generator: torch.Generator) -> None:
    logits = shuffled((6, 20), generator).bfloat16()
    bias = torch.randn(20, generator=generator, device=generator.device).bfloat16()
    experts, weights = route(logits, SOFTMAX, bias=bias)
    expected, expected_weights = route_twin(logits.double(), SOFTMAX, bias=bias.double())
    assert torch.equal(experts, expected)
    assert torch.allclose(weights.double(), expected_weights, rtol=1e-5)
    assert not torch.equal(experts, route(logits, SOFTMAX)[0])


def test_the_first_of_equal_groups_are_chosen(device: torch.device) -> None:
    choice = Choice(num_chosen=3, is_sigmoid=True, num_groups=4, num_chosen_groups=2)
    logits = torch.tensor([[1.0, 0, 0, 1, 5, -9, 1, 0]], device=device)
    # Sums of scores: 1.23, 1.23, 0.99, 1.23; the largest score is in no chosen group.
    experts, _ = route(logits, choice)
    assert experts.tolist() == [[0, 3, 1]]


def test_logits_that_are_no_numbers_choose_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((2, 12), torch.nan, device=device)
    experts, _ = route(logits, SOFTMAX)
    assert bool(((experts >= 0) & (experts < 12)).all())


@GPU
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_has_the_same_bits_in_every_batch(name: str, generator: torch.Generator) -> None:
    logits = torch.randn(3000, 160, generator=generator, device=generator.device).bfloat16()
    together = route(logits, CHOICES[name])
    for first, count in ((0, 1), (7, 1), (100, 33), (512, 1000)):
        alone = route(logits[first : first + count], CHOICES[name])
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a, b[first : first + count])


def test_tokens_of_each_expert_are_added_to_counts(generator: torch.Generator) -> None:
    logits = torch.randn(37, 24, generator=generator, device=generator.device)
    counts = torch.full((24,), 1 << 33, dtype=torch.int64, device=logits.device)
    # Those of other ranks count too.
    for own in (None, range(6, 12)):
        route(logits, Choice(num_chosen=5, own=own), counts=counts)
    experts, _ = route(logits, Choice(num_chosen=5))
    expected = 2 * experts.flatten().bincount(minlength=24)
    assert torch.equal(counts - (1 << 33), expected)
