"""Models with latent attention on a GPU: tokens are those of transformers, and an answer has the
bits of a whole prompt, however its latents came into the cache."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.oracle_speculator import OracleSpeculator
from tests.engine_core.small_models import (
    Answer,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
    reference_greedy,
    without_indexers,
)

pytestmark = pytest.mark.gpu

OF_HOPPER = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64}
"""Sizes that the kernels for Hopper serve."""
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=["tiny", "of-hopper", "indexed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model in bfloat16."""
    base = tmp_path_factory.mktemp("latents")
    sizes = OF_HOPPER if request.param == "of-hopper" else {}
    family = "deepseek-v3.2" if request.param == "indexed" else "glm4-moe-lite"
    random_checkpoint(family, base / "source", **sizes)
    return convert(base / "source", base / "ours", "bfloat16")


def engine(folder: Path, **options: Any) -> SmallEngine:
    roomy = {
        "device": "cuda",
        "block_size": 64,
        "num_blocks": 900,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
    }
    return SmallEngine(folder, **roomy | options)


def prompts(count: int) -> list[list[int]]:
    torch.manual_seed(2)
    lens = [(1, 63, 64, 65, 127, 129, 511, 700)[i % 8] + i // 8 for i in range(count)]
    return [torch.randint(3, 500, (n,)).tolist() for n in lens]


def exact(given: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(each.token_ids, [entry.logprob for entry in each.logprobs]) for each in given]


@pytest.mark.parametrize("block_size", [16, 64])
def test_tokens_and_logprobs_are_those_of_transformers(block_size: int, tmp_path: Path) -> None:
    """Of a model without experts. Products of float32 read ten bits on a GPU, which moves log
    probabilities by 0.011 here, and may choose other experts; `test_cuda_engine` has families with
    experts."""
    model = random_checkpoint("minicpm3", tmp_path / "hf")
    asked = prompts(8)
    with closing(engine(convert(tmp_path / "hf", tmp_path / "ours"), block_size=block_size)) as one:
        answers = one.answer(asked, greedy(8, num_logprobs=0))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.token_ids == reference_greedy(model, prompt, 8)
        with torch.no_grad():
            expected = model(torch.tensor([prompt + answer.token_ids])).logits[0].log_softmax(-1)
        after = expected[len(prompt) - 1 : -1]
        chosen = [after[i, token].item() for i, token in enumerate(answer.token_ids)]
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(chosen, abs=2e-2)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_chunks_company_hits_and_preemption_change_no_bit(folder: Path, cache: str) -> None:
    of_cache = {"kv_cache_dtype": cache}
    asked = prompts(24)
    seeded = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=NUM_TOKENS, num_logprobs=1)
        for i in range(len(asked))
    ]
    with closing(engine(folder, **of_cache)) as one:
        together = exact(one.answer(asked, *seeded))
        again = one.answer(asked, *seeded)
        assert exact(again) == together
        assert again[7].cached_tokens >= 640
    for options in ({"max_num_batched_tokens": 200, "async_depth": 4}, {"num_blocks": 60}):
        with closing(engine(folder, **options, **of_cache)) as one:
            assert exact(one.answer(asked, *seeded)) == together
    with closing(engine(folder, **of_cache)) as one:
        for prompt, sampling, expected in list(zip(asked, seeded, together, strict=True))[::5]:
            assert exact(one.answer([prompt], sampling)) == [expected]


def test_latents_in_e4m3_move_log_probabilities_a_little(folder: Path) -> None:
    asked = prompts(16)
    answers = []
    for cache in ("auto", "fp8"):
        with closing(engine(folder, kv_cache_dtype=cache)) as one:
            answers.append(
                [found[1][0] for found in exact(one.answer(asked, greedy(1, num_logprobs=1)))]
            )
    moved = [abs(a - b) for a, b in zip(*answers, strict=True)]
    assert 0 < max(moved) < 1
    assert sum(moved) / len(moved) < 0.2


def test_drafts_change_no_bit(folder: Path) -> None:
    asked = prompts(16)
    scored = greedy(60, num_logprobs=1)
    with closing(engine(folder)) as one:
        plain = one.answer(asked, scored)

    def oracle(config: EngineConfig) -> OracleSpeculator:
        return OracleSpeculator(plain, 0.4, max_drafts=7).beside(config)

    with closing(engine(folder, max_draft_tokens=7, speculate=oracle)) as one:
        drafted = one.answer(asked, scored)
        assert one.engine.load().num_accepted_tokens > 0
    assert exact(drafted) == exact(plain)


def test_latents_come_back_from_host_memory(folder: Path) -> None:
    asked = prompts(16)
    scored = greedy(8, num_logprobs=1)
    with closing(engine(folder)) as one:
        expected = exact(one.answer(asked, scored))
    with closing(engine(folder, num_blocks=40, kv_swap_memory=64 << 20)) as one:
        one.answer(asked, scored)
        found = [one.answer([prompt], scored)[0] for prompt in asked]
        load = one.engine.load()
    assert load.hits_by_tier["host"] > 0
    assert exact(found) == expected


@pytest.mark.parametrize(
    "sizes", [{}, OF_HOPPER | {"index_head_dim": 128}], ids=["tiny", "of-hopper"]
)
def test_indexers_that_choose_every_token_change_no_bit(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    random_checkpoint("deepseek-v3.2", tmp_path / "indexed", index_topk=1024, **sizes)
    without_indexers(tmp_path / "indexed", tmp_path / "plain")
    asked = prompts(16)
    answers = []
    for name in ("indexed", "plain"):
        folder = convert(tmp_path / name, tmp_path / f"ours-{name}", "bfloat16")
        with closing(engine(folder)) as one:
            answers.append(exact(one.answer(asked, greedy(8, num_logprobs=1))))
    assert answers[0] == answers[1]
