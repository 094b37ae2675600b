"""Engines of two ranks beside one process: on two GPUs, or where there is one on that, by turns."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.executors.ranks.rank_devices import SHARE
from headwater.engine_core.parallel.rank_facts import RankLost
from headwater.engine_core.sampling_params import SamplingParams
from headwater.kernels.quant.block_formats import Q4_K, Q6_K, Q8_0
from tests.engine_core.block_models import write_blocks
from tests.engine_core.fp8_block_models import written_blocks
from tests.engine_core.parallel.parallel_models import QWEN3, folder_of
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS, SAMPLED, SAMPLINGS, refused
from tests.engine_core.small_models import SmallEngine, greedy
from tests.engine_core.test_cuda_engine import behind_the_likeliest

pytestmark = pytest.mark.gpu

SMALL = {
    "device": "cuda",
    "block_size": 64,
    "num_blocks": 60,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
}


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv(SHARE, "1")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"), "bfloat16")


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[SmallEngine]:
    one = SmallEngine(folder, **SMALL | options)
    try:
        yield one
    finally:
        one.close()


def test_an_answer_of_two_ranks_is_likely_and_has_bits_of_its_own(qwen3: tuple[Any, Path]) -> None:
    model, folder = qwen3
    model = model.bfloat16().float().cuda()
    with engine(folder, tensor_parallel_size=2) as two:
        assert isinstance(two.executor, MultiExecutor)
        divided = two.answer(PROMPTS, *SAMPLINGS)
        answers = two.tokens(PROMPTS, greedy(12, num_logprobs=3, num_prompt_logprobs=0))
        # Again, now that all graphs are there, and one by one: bits are a row's own.
        again = two.answer(PROMPTS, *SAMPLINGS)
        alone = [
            two.answer([prompt], sampling)[0]
            for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
        ]
        figures = two.executor.rank_figures()
    for answered in (again, alone):
        assert [each.token_ids for each in answered] == [each.token_ids for each in divided]
        assert [each.logprobs for each in answered] == [each.logprobs for each in divided]
    assert figures[0].num_plans >= 40
    gaps = [behind_the_likeliest(model, *each) for each in zip(PROMPTS, answers, strict=True)]
    # bf16 may choose another of two tokens that are nearly equal.
    assert torch.cat(gaps).max() < 0.3


def test_two_ranks_score_nearly_as_one_process(qwen3: tuple[Any, Path]) -> None:
    scored = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=0)
    with engine(qwen3[1]) as one, engine(qwen3[1], tensor_parallel_size=2) as two:
        alone = one.answer(PROMPTS[2:], scored)
        divided = two.answer(PROMPTS[2:], scored)
    for ours, theirs in zip(divided, alone, strict=True):
        a, b = (
            np.array([entry.logprob for entry in each.prompt_logprobs]) for each in (ours, theirs)
        )
        # bf16 rounds the parts of a sum that one process rounds once.
        assert np.abs(a - b).mean() < 0.2


def test_weights_in_blocks_answer_on_two_ranks_as_they_do_expanded_to_the_bit(
    tmp_path: Path,
) -> None:
    """Parts of `o` would be cut inside a block of 256 inputs where it has such: these are
    expanded."""
    answers = []
    for folder in write_blocks(tmp_path, (Q6_K, Q4_K, Q8_0), "bfloat16"):
        with engine(folder, tensor_parallel_size=2) as two:
            answers.append(two.answer(PROMPTS, *SAMPLINGS))
    packed, expanded = ([(each.token_ids, each.logprobs) for each in some] for some in answers)
    assert packed == expanded


def test_weights_of_eight_bits_stay_packed_on_two_ranks_and_tokens_are_rounded(
    tmp_path: Path,
) -> None:
    packed, expanded = written_blocks(tmp_path)
    scored = SamplingParams(temperature=0.0, max_tokens=8, num_prompt_logprobs=0)

    def answers(folder: Path, **options: Any) -> list[Any]:
        with engine(folder, **options) as some:
            found = some.answer(PROMPTS, *[scored] * len(PROMPTS))
            alone = some.answer(PROMPTS[2:3], scored)
        assert (alone[0].token_ids, alone[0].logprobs) == (found[2].token_ids, found[2].logprobs)
        return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in found]

    exact = answers(packed, tensor_parallel_size=2, activation_dtype="model")
    assert exact == answers(expanded, tensor_parallel_size=2)
    rounded = answers(packed, tensor_parallel_size=2)
    one = answers(packed)
    assert rounded != exact

    def distance(some: list[Any], others: list[Any]) -> float:
        # A prompt of one token has no log probabilities.
        pairs = zip(some[2:], others[2:], strict=True)
        return float(np.mean([np.abs(_scores(a) - _scores(b)).mean() for a, b in pairs]))

    # Sums of two ranks are rounded elsewhere, and some numbers of the next layer then to another
    # e4m3 number.
    cost = distance(one, answers(packed, activation_dtype="model"))
    assert distance(rounded, one) < cost, (distance(rounded, one), cost)


def _scores(answer: tuple[Any, ...]) -> Any:
    return np.array([entry.logprob for entry in answer[2]])


@pytest.mark.parametrize("tree", [False, True], ids=["default", "tree"])
def test_answers_through_host_memory_have_the_bits_of_those_between_gpus(
    qwen3: tuple[Any, Path], caplog: pytest.LogCaptureFixture, tree: bool
) -> None:
    numerics = {"numerics": "tree"} if tree else {}
    # Steps of one row and of many, and draws that join logits.
    prompts = [*PROMPTS, *[[(7 * i + j) % 500 + 3 for j in range(90)] for i in range(6)]]
    asked = [
        *SAMPLINGS,
        *[replace(SAMPLED, seed=seed, max_tokens=20, num_logprobs=2) for seed in range(6)],
    ]
    answers = {}
    output = {}
    for access in ("auto", "off"):
        caplog.clear()
        with engine(qwen3[1], tensor_parallel_size=2, peer_access=access, **numerics) as two:
            found = two.answer(prompts, *asked)
            # Again, from graphs.
            again = two.answer(prompts, *asked)
        assert [each.token_ids for each in again] == [each.token_ids for each in found]
        answers[access] = [(each.token_ids, each.logprobs) for each in found]
        output[access] = [text for text in caplog.messages if "through host memory" in text]
    assert answers["off"] == answers["auto"]
    sentence = (
        "peer_access is off: ranks exchange tensors through host memory, which is slower "
        "than between GPUs"
    )
    assert output["off"] == [sentence]


@pytest.mark.parametrize("access", ["auto", "off"])
def test_the_death_of_a_rank_ends_the_executor(qwen3: tuple[Any, Path], access: str) -> None:
    with engine(qwen3[1], tensor_parallel_size=2, peer_access=access) as two:
        two.tokens(PROMPTS[:1], greedy(2))
        assert isinstance(two.executor, MultiExecutor)
        os.kill(two.executor.ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
            two.tokens(PROMPTS, greedy(200))


def test_a_family_whose_norms_stand_before_the_sum_answers_as_transformers(tmp_path: Path) -> None:
    model, folder = folder_of("gemma3 of 4 and 2 heads", tmp_path, "bfloat16")
    with engine(folder, tensor_parallel_size=2) as two:
        answers = two.tokens(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12))
    model = model.bfloat16().float().cuda()
    gaps = [behind_the_likeliest(model, *each) for each in zip(PROMPTS, answers, strict=True)]
    assert torch.cat(gaps).max() < 0.3


@pytest.mark.parametrize("family", ["olmo2", "minimax-m2"])
def test_norms_over_all_heads_are_those_of_transformers_and_a_row_alone_has_their_bits(
    family: str, tmp_path: Path
) -> None:
    model, folder = folder_of(family, tmp_path)
    scored = greedy(12, num_logprobs=1)
    with engine(folder, tensor_parallel_size=2) as two:
        together = two.answer(PROMPTS, scored)
        alone = [two.answer([prompt], scored)[0] for prompt in PROMPTS]
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    answers = [each.token_ids for each in together]
    gaps = [
        behind_the_likeliest(model.cuda(), *each) for each in zip(PROMPTS, answers, strict=True)
    ]
    assert torch.cat(gaps).max() < 0.3


def test_more_ranks_than_gpus_are_refused(
    qwen3: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert refused(qwen3[1], device="cuda", block_size=64, tensor_parallel_size=2) == (
        "tensor_parallel_size is 2; allowed: at most 1 ranks on this machine, on the platform cuda"
    )
    assert refused(qwen3[1], device="cuda", block_size=64, pipeline_parallel_size=2) == (
        "pipeline_parallel_size is 2; allowed: at most 1 ranks on this machine, on the "
        "platform cuda"
    )


def test_one_prompt_has_one_answer_in_a_thousand_changing_batches(qwen3: tuple[Any, Path]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("takes minutes where two ranks share a GPU")
    rng = np.random.default_rng(3)
    asked = replace(SAMPLED, seed=11, max_tokens=6, num_logprobs=2)
    with engine(qwen3[1], tensor_parallel_size=2) as two:
        [expected] = two.answer([PROMPTS[1]], asked)
        num_left = 1000
        while num_left:
            copies = int(rng.integers(1, min(num_left, 6) + 1))
            others = [
                rng.integers(3, 512, int(rng.integers(1, 90))).tolist() for _ in range(8 - copies)
            ]
            prompts = [*others, *[PROMPTS[1]] * copies]
            order = rng.permutation(len(prompts))
            answers = two.answer([prompts[i] for i in order], asked)
            ours = [answer for i, answer in zip(order, answers, strict=True) if i >= len(others)]
            assert all(each.token_ids == expected.token_ids for each in ours)
            assert all(each.logprobs == expected.logprobs for each in ours)
            num_left -= copies
