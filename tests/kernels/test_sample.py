from __future__ import annotations

import pytest
import torch

from headwater.kernels.gemm.gemm import configure_blas, linear
from headwater.kernels.sampling.lm_head_sample import lm_head_sample
from headwater.kernels.sampling.sample import Candidates, Draws, sample, scores_twin
from headwater.kernels.sampling.token_mask import mask_tokens
from tests.kernels.paging import GPU, LONG_INTERPRETED


def random_draws(num_rows: int, generator: torch.Generator, greedy: bool = True) -> Draws:
    device = generator.device
    temperatures = torch.rand(num_rows, generator=generator, device=device) * 1.5 + 0.1
    if greedy:
        temperatures[::3] = 0
    return Draws(
        temperatures=temperatures,
        seeds=torch.randint(-(1 << 62), 1 << 62, (num_rows,), generator=generator, device=device),
        choice_indices=torch.randint(
            0, 4, (num_rows,), generator=generator, device=device, dtype=torch.int32
        ),
        output_indices=torch.randint(
            0, 999, (num_rows,), generator=generator, device=device, dtype=torch.int32
        ),
    )


def drawn(logits: torch.Tensor, draws: Draws, masks: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device)
    sample(
        logits, draws, Candidates.allocate(len(logits), logits.shape[1], logits.device), out, masks
    )
    return out


def assert_best(scores: torch.Tensor, tokens: torch.Tensor) -> None:
    """The drawn token's score is the best up to the noise's last digits."""
    gap = scores.amax(1) - scores.gather(1, tokens.long()[:, None])[:, 0]
    assert gap.max().item() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 100), (7, 5000), (4, 8192), pytest.param(256, 151_936, marks=GPU)]
)
def test_the_drawn_token_has_the_best_perturbed_score(
    rows: int, vocab: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    logits = (torch.randn(rows, vocab, generator=generator, device=generator.device) * 4).to(dtype)
    draws = random_draws(rows, generator)
    tokens = drawn(logits, draws)
    assert_best(scores_twin(logits, draws), tokens)
    assert torch.equal(tokens[::3], logits[::3].float().argmax(1).int()) or dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 100), (7, 5000), (4, 8192), pytest.param(256, 151_936, marks=GPU)]
)
def test_a_draw_under_masks_is_that_of_masked_logits(
    rows: int, vocab: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    device = generator.device
    logits = (torch.randn(rows, vocab, generator=generator, device=device) * 4).to(dtype)
    # One word more than a row needs, between rows that lie further apart.
    words = torch.randint(
        -(1 << 31), 1 << 31, (rows, vocab // 32 + 9), generator=generator, device=device
    )
    words &= torch.randint(-(1 << 31), 1 << 31, words.shape, generator=generator, device=device)
    masks = words.int()[:, : vocab // 32 + 2]
    logits[0, ::2] = float("-inf")
    draws = random_draws(rows, generator)
    masked = torch.empty(rows, vocab, device=device)
    mask_tokens(logits, masks, masked)
    tokens = drawn(logits, draws, masks)
    assert torch.equal(tokens, drawn(masked, draws))
    assert (masks.gather(1, tokens.long()[:, None] // 32)[:, 0] >> tokens % 32 & 1).all()


def test_on_a_tie_the_smaller_id_wins(device: torch.device) -> None:
    logits = torch.zeros(2, 9000, device=device)
    logits[0, [7, 8, 8500]] = 3.0
    logits[1, [8999, 5000]] = 1.0
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    draws = Draws(
        temperatures=zeros.float(), seeds=zeros.long(), choice_indices=zeros, output_indices=zeros
    )
    assert drawn(logits, draws).tolist() == [7, 5000]


@pytest.mark.long
def test_tokens_come_as_often_as_their_probability(device: torch.device) -> None:
    rows = 2000 if device.type == "cuda" else 160
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125], device=device)
    counters = torch.arange(rows, dtype=torch.int32, device=device)
    draws = Draws(
        temperatures=torch.ones(rows, device=device),
        seeds=torch.full((rows,), 42, device=device),
        choice_indices=torch.zeros_like(counters),
        output_indices=counters,
    )
    tokens = drawn(probabilities.log().expand(rows, 4).contiguous(), draws)
    frequencies = torch.bincount(tokens, minlength=4) / rows
    assert (frequencies - probabilities).abs().max().item() < 4 * (0.25 / rows) ** 0.5


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab"),
    [
        (1, 128, 300),
        pytest.param(5, 192, 1000, marks=LONG_INTERPRETED),
        *(pytest.param(m, 1024, 151_936, marks=GPU) for m in (1, 16)),
    ],
)
def test_the_fused_head_draws_what_sample_draws(
    rows: int, hidden: int, vocab: int, generator: torch.Generator
) -> None:
    device = generator.device
    if device.type == "cuda":
        configure_blas()
    x = torch.randn(rows, hidden, generator=generator, device=device).bfloat16()
    weight = torch.randn(vocab, hidden, generator=generator, device=device).bfloat16() / hidden**0.5
    draws = random_draws(rows, generator)
    out = torch.full((rows,), -1, dtype=torch.int32, device=device)
    lm_head_sample(x, weight, draws, Candidates.allocate(rows, vocab, device), out)
    assert torch.equal(out, drawn(linear(x, weight), draws))


@GPU
def test_a_row_draws_the_same_token_in_any_batch(generator: torch.Generator) -> None:
    logits = torch.randn(200, 151_936, generator=generator, device=generator.device).bfloat16()
    draws = random_draws(200, generator)
    together = drawn(logits, draws)
    for i in (0, 1, 77, 199):
        one = slice(i, i + 1)
        alone = Draws(
            temperatures=draws.temperatures[one],
            seeds=draws.seeds[one],
            choice_indices=draws.choice_indices[one],
            output_indices=draws.output_indices[one],
        )
        assert drawn(logits[one], alone).item() == together[i].item()
