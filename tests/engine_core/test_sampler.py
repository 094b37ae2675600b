"""Each rule of the sampling contract, seen in the token it chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import AdmittedRow
from headwater.engine_core.platforms.cpu_sampling import CpuSampling
from headwater.engine_core.sampling.sampler import Sampler
from headwater.engine_core.sampling_params import SamplingParams
from headwater.kernels.cpu.sampling.candidate_sample import candidate_sample
from headwater.kernels.sampling.filtered_sample import Filters, filtered_sample_twin
from headwater.kernels.sampling.sample import Draws

NO_IDS = np.empty(0, np.int32)


def choose(
    logits: list[float],
    *,
    outputs: list[int] | None = None,
    prompt: list[int] | None = None,
    **rules: Any,
) -> int:
    """The token that one row chooses."""
    sampler = Sampler(1, CpuSampling(), torch.device("cpu"))
    outputs = outputs or []
    params = SamplingParams(**{"temperature": 0.0} | rules)
    ids = np.array(prompt or [], np.int32)
    known = np.array(outputs, np.int32)
    sampler.admit(
        AdmittedRow(
            row=0, token_ids=ids, num_prompt_tokens=len(ids), sampling=params, choice_index=0
        )
    )
    index = np.array([len(outputs)], np.int32)
    tokens, _ = sampler.sample(
        torch.tensor([logits]), np.zeros(1, np.int32), index, lambda i: known
    )
    return int(tokens[0])


def test_greedy_takes_the_highest_and_among_equals_the_first() -> None:
    assert choose([1.0, 3.0, 3.0, 2.0]) == 1


def test_only_allowed_ids_are_taken() -> None:
    assert choose([9.0, 1.0, 2.0], allowed_token_ids=(1, 2)) == 2


def test_a_bad_word_of_one_token_never_comes() -> None:
    assert choose([9.0, 8.0], bad_words=((0,),)) == 1


def test_a_bad_word_of_several_tokens_is_stopped_at_its_last() -> None:
    assert choose([9.0, 8.0, 0.0], outputs=[2, 1], bad_words=((2, 1, 0),)) == 1
    assert choose([9.0, 8.0, 0.0], outputs=[1, 1], bad_words=((2, 1, 0),)) == 0


def test_stop_ids_wait_for_min_tokens() -> None:
    rules: dict[str, Any] = {"min_tokens": 2, "min_tokens_blocked_ids": (0,)}
    assert choose([9.0, 8.0], outputs=[1], **rules) == 1
    assert choose([9.0, 8.0], outputs=[1, 1], **rules) == 0


def test_a_bias_is_added() -> None:
    assert choose([1.0, 0.0], logit_bias={1: 2.0}) == 1


def test_presence_counts_an_output_once_and_frequency_each_time() -> None:
    assert choose([2.0, 1.5], outputs=[0, 0, 0], presence_penalty=0.6) == 1
    assert choose([2.0, 1.5], outputs=[0], frequency_penalty=0.4) == 0
    assert choose([2.0, 1.5], outputs=[0, 0, 0], frequency_penalty=0.4) == 1


def test_repetition_counts_the_prompt_too() -> None:
    assert choose([2.0, 1.5], prompt=[0], repetition_penalty=1.5) == 1
    assert choose([2.0, 1.5], prompt=[0], presence_penalty=2.0) == 0


def test_a_seed_gives_the_same_token_and_another_seed_other_ones() -> None:
    logits = [0.0] * 1000
    first = [choose(logits, temperature=1.0, seed=seed) for seed in range(20)]
    assert first == [choose(logits, temperature=1.0, seed=seed) for seed in range(20)]
    assert len(set(first)) > 15


def test_samples_are_distributed_as_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    count = 20_000
    sampler = Sampler(1, CpuSampling(), torch.device("cpu"))
    params = SamplingParams(temperature=0.7, seed=5)
    sampler.admit(
        AdmittedRow(
            row=0,
            token_ids=np.empty(0, np.int32),
            num_prompt_tokens=1,
            sampling=params,
            choice_index=0,
        )
    )
    tokens, _ = sampler.sample(
        logits.expand(count, -1),
        np.zeros(count, np.int32),
        np.arange(count, dtype=np.int32),
        lambda i: NO_IDS,
    )
    observed = np.bincount(tokens, minlength=4) / count
    assert observed == pytest.approx((logits / 0.7).softmax(0).numpy(), abs=0.012)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (0, 0.3, 0.0), (0, 0.99, 0.0), (700, 0.9, 0.0), (0, 1.0, 0.2), (50, 0.7, 0.05)],
)
def test_candidates_give_the_token_that_sorting_everything_gives(
    top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 3000, generator=generator) * torch.linspace(0.1, 6, 64)[:, None]
    rows = torch.arange(64, dtype=torch.int32)
    draws = Draws(
        temperatures=torch.full((64,), 0.8),
        seeds=rows.long(),
        choice_indices=rows,
        output_indices=rows,
    )
    filters = Filters(
        top_ks=torch.full((64,), top_k, dtype=torch.int32),
        top_ps=torch.full((64,), top_p),
        min_ps=torch.full((64,), min_p),
    )
    assert torch.equal(
        candidate_sample(logits, draws, filters), filtered_sample_twin(logits, draws, filters)
    )


def test_a_row_with_a_nan_logit_has_nan_log_probabilities() -> None:
    sampler = Sampler(2, CpuSampling(), torch.device("cpu"))
    params = SamplingParams(temperature=0.0, num_logprobs=1)
    for row in range(2):
        sampler.admit(
            AdmittedRow(
                row=row, token_ids=NO_IDS, num_prompt_tokens=0, sampling=params, choice_index=0
            )
        )
    logits = torch.tensor([[1.0, np.nan, 3.0] * 20, [1.0, 2.0, 3.0] * 20])
    _, scores = sampler.sample(
        logits, np.arange(2, dtype=np.int32), np.zeros(2, np.int32), lambda i: NO_IDS
    )
    assert np.isnan(scores[0].logprob)
    assert scores[1].logprob == pytest.approx(3.0 - np.log(20 * np.exp([1.0, 2.0, 3.0]).sum()))
