from __future__ import annotations

import pytest
import torch

from headwater.kernels.sampling.filtered_sample import Filters, filter_twin, filtered_sample
from headwater.kernels.sampling.sample import scores_twin
from tests.kernels.paging import GPU, LONG_INTERPRETED
from tests.kernels.test_sample import assert_best, drawn, random_draws

FILTERS = {
    "top-k": (5, 1.0, 0.0),
    "top-1": (1, 1.0, 0.0),
    "top-p": (0, 0.9, 0.0),
    "small-top-p": (0, 0.01, 0.0),
    "min-p": (0, 1.0, 0.1),
    "top-k-and-p": (40, 0.8, 0.0),
    "all": (50, 0.95, 0.02),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [
        pytest.param(2, 100, marks=LONG_INTERPRETED),
        (3, 9000),
        *(pytest.param(r, 151_936, marks=GPU) for r in (1, 256)),
    ],
)
def test_the_drawn_token_is_the_best_of_those_kept(
    rows: int, vocab: int, name: str, generator: torch.Generator
) -> None:
    device = generator.device
    top_k, top_p, min_p = FILTERS[name]
    logits = torch.randn(rows, vocab, generator=generator, device=device) * 3
    draws = random_draws(rows, generator, greedy=False)
    filters = Filters(
        top_ks=torch.full((rows,), top_k, dtype=torch.int32, device=device),
        top_ps=torch.full((rows,), top_p, device=device),
        min_ps=torch.full((rows,), min_p, device=device),
    )
    out = torch.full((rows,), -1, dtype=torch.int32, device=device)
    filtered_sample(logits, draws, filters, out)
    kept = filter_twin(logits, draws, filters)
    # A token whose cumulative probability equals top_p to the last digits may fall on either side.
    assert kept.gather(1, out.long()[:, None]).float().mean().item() > 0.99
    if rows < 100:
        assert_best(scores_twin(logits, draws).masked_fill(~kept, float("-inf")), out)


def test_rows_without_filters_and_greedy_rows_are_left_alone(generator: torch.Generator) -> None:
    device = generator.device
    logits = torch.randn(4, 500, generator=generator, device=device)
    draws = random_draws(4, generator)
    filters = Filters(
        top_ks=torch.tensor([5, 0, 500, 5], dtype=torch.int32, device=device),
        top_ps=torch.ones(4, device=device),
        min_ps=torch.zeros(4, device=device),
    )
    out = torch.full((4,), -7, dtype=torch.int32, device=device)
    filtered_sample(logits, draws, filters, out)
    assert out.tolist() == [-7, -7, -7, -7]


def test_filters_that_keep_everything_draw_what_sample_draws(generator: torch.Generator) -> None:
    device = generator.device
    logits = (torch.randn(5, 3000, generator=generator, device=device) * 2).bfloat16()
    draws = random_draws(5, generator, greedy=False)
    filters = Filters(
        top_ks=torch.full((5,), 2999, dtype=torch.int32, device=device),
        top_ps=torch.ones(5, device=device),
        min_ps=torch.full((5,), 1e-20, device=device),
    )
    out = torch.full((5,), -1, dtype=torch.int32, device=device)
    filtered_sample(logits, draws, filters, out)
    assert torch.equal(out, drawn(logits, draws))


def test_three_of_the_likeliest_in_one_lane_are_all_found(generator: torch.Generator) -> None:
    device = generator.device
    logits = torch.randn(6, 20_000, generator=generator, device=device)
    # Equal modulo the width of a block.
    logits[:, [7, 8199, 16391]] = torch.tensor([9.0, 9.5, 9.2], device=device)
    draws = random_draws(6, generator, greedy=False)
    filters = Filters(
        top_ks=torch.full((6,), 3, dtype=torch.int32, device=device),
        top_ps=torch.full((6,), 0.99, device=device),
        min_ps=torch.zeros(6, device=device),
    )
    out = torch.full((6,), -1, dtype=torch.int32, device=device)
    filtered_sample(logits, draws, filters, out)
    kept = filter_twin(logits, draws, filters)
    assert_best(scores_twin(logits, draws).masked_fill(~kept, float("-inf")), out)


def test_ties_at_the_cut_are_all_kept(device: torch.device) -> None:
    rows = 64 if device.type == "cuda" else 12
    logits = torch.full((rows, 50), -5.0, device=device)
    logits[:, [3, 30, 40]] = 1.0
    counters = torch.arange(rows, dtype=torch.int32, device=device)
    draws = random_draws(rows, torch.Generator(device), greedy=False)
    filters = Filters(
        top_ks=torch.full((rows,), 2, dtype=torch.int32, device=device),
        top_ps=torch.full((rows,), 0.999, device=device),
        min_ps=torch.zeros(rows, device=device),
    )
    out = torch.zeros_like(counters)
    filtered_sample(logits, draws, filters, out)
    assert set(out.tolist()) == {3, 30, 40}
