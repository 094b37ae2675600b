"""Sampled drafts that are drawn with the noise of the draw that verifies them, beside the published
rejection rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import AdmittedRow, Int32Array
from headwater.engine_core.platforms.cpu_sampling import CpuSampling
from headwater.engine_core.sampling.sampler import Sampler
from headwater.engine_core.sampling_params import SamplingParams

CPU = torch.device("cpu")
NUM_DRAWS = 20_000
FIRST_SEED = 12_345


def drawn(logits: torch.Tensor, num_draws: int, seed: int = FIRST_SEED) -> Int32Array:
    """Tokens of output indices 0 … num_draws − 1 after logits [V]."""
    sampler = Sampler(1, CpuSampling(), CPU)
    sampling = SamplingParams(temperature=1.0, seed=seed)
    prompt = np.ones(1, np.int32)
    sampler.admit(
        AdmittedRow(row=0, token_ids=prompt, num_prompt_tokens=1, sampling=sampling, choice_index=0)
    )
    rows = np.zeros(num_draws, np.int32)
    nothing = np.empty(0, np.int32)
    indices = np.arange(num_draws, dtype=np.int32)
    return sampler.draw(logits.repeat(num_draws, 1), rows, indices, lambda i: nothing)


def pair(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a served model and of one that drafts for it."""
    generator = torch.Generator().manual_seed(seed)
    size = [2, 5, 24, 200][seed % 4]
    served = 2.5 * torch.randn(size, generator=generator)
    noise = torch.randn(size, generator=generator)
    drafting = {"near": served + 0.3 * noise, "far": served + 2.0 * noise, "strange": 2.5 * noise}
    return served, drafting[kind]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["near", "far", "strange"])
def test_as_many_are_accepted_as_the_bound_of_shared_noise_says(kind: str, seed: int) -> None:
    """With a distance TV between two distributions the rejection rule accepts 1 − TV (Leviathan et
    al. 2023), whoever draws. Two draws with one noise agree with probability at least (1 − TV) / (1
    + TV) (Gumbel-max coupling, Daliri, Musco, Suresh 2024), and never more often than the rule
    accepts."""
    served, drafting = pair(kind, seed)
    rule = torch.minimum(served.softmax(0), drafting.softmax(0)).sum().item()
    bound = rule / (2 - rule)
    accepted = float((drawn(served, NUM_DRAWS) == drawn(drafting, NUM_DRAWS)).mean())
    error = 4 * np.sqrt(0.25 / NUM_DRAWS)
    assert bound - error < accepted < rule + error


def test_draws_with_noise_of_their_own_agree_less_often() -> None:
    """The bound is one of shared noise: independent draws from two near distributions miss it by
    far."""
    served, drafting = pair("near", 3)
    rule = torch.minimum(served.softmax(0), drafting.softmax(0)).sum().item()
    accepted = float((drawn(served, NUM_DRAWS) == drawn(drafting, NUM_DRAWS, seed=999)).mean())
    assert accepted < rule / (2 - rule) - 0.2


def test_one_distribution_drawn_twice_is_always_accepted() -> None:
    served, _ = pair("far", 2)
    assert (drawn(served, 5000) == drawn(served.clone(), 5000)).all()
