"""Models with latent attention on two GPUs, or by turns on one, that divide its heads: answers are
likely, and have the bits of a whole prompt, however latents came into the cache."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.oracle_speculator import OracleSpeculator
from tests.engine_core.parallel.test_stages_on_gpu import share_unless
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.engine_core.test_cuda_engine import behind_the_likeliest
from tests.engine_core.test_cuda_latents import OF_HOPPER, engine, exact, prompts

pytestmark = pytest.mark.gpu

MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "of-hopper": ("glm4-moe-lite", OF_HOPPER),
    "indexed": ("deepseek-v3.2", {}),
}
"""Families, and fields of their configs."""
SCORED = greedy(40, num_logprobs=1)


@pytest.fixture(autouse=True)
def _sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    share_unless(2, monkeypatch)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model in bfloat16."""
    family, sizes = MODELS[request.param]
    base = tmp_path_factory.mktemp("latents")
    random_checkpoint(family, base / "source", **sizes)
    return convert(base / "source", base / "ours", "bfloat16")


def ranks(folder: Path, **options: Any) -> SmallEngine:
    return engine(folder, **{"tensor_parallel_size": 2} | options)


@pytest.mark.parametrize("family", ["minicpm3", "deepseek-v2", "deepseek-v3"])
def test_answers_follow_the_likeliest_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_checkpoint(family, tmp_path / "hf").cuda()
    asked = prompts(8)
    with closing(ranks(convert(tmp_path / "hf", tmp_path / "ours"))) as two:
        answers = two.tokens(asked, greedy(12))
    far = torch.cat(
        [behind_the_likeliest(model, *each) for each in zip(asked, answers, strict=True)]
    )
    assert far.max() < 0.3
    assert (far == 0).double().mean() > 0.85


def test_chunks_company_hits_and_preemption_change_no_bit(folder: Path) -> None:
    asked = prompts(8)
    seeded = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=16, num_logprobs=1)
        for i in range(len(asked))
    ]
    with closing(ranks(folder)) as two:
        together = exact(two.answer(asked, *seeded))
        again = two.answer(asked, *seeded)
        assert exact(again) == together
        assert again[7].cached_tokens >= 640
        for prompt, sampling, expected in list(zip(asked, seeded, together, strict=True))[::5]:
            assert exact(two.answer([prompt], sampling)) == [expected]
    with closing(ranks(folder, max_num_batched_tokens=200, async_depth=4, num_blocks=24)) as two:
        assert exact(two.answer(asked, *seeded)) == together


def test_drafts_beside_whole_experts_change_no_bit(folder: Path) -> None:
    asked = prompts(8)
    with closing(ranks(folder, expert_parallel=True)) as two:
        plain = two.answer(asked, SCORED)

    def oracle(config: EngineConfig) -> OracleSpeculator:
        return OracleSpeculator(plain, 0.4, max_drafts=7).beside(config)

    drafts = {"max_draft_tokens": 7, "speculate": oracle}
    with closing(ranks(folder, expert_parallel=True, **drafts)) as two:
        drafted = two.answer(asked, SCORED)
        assert two.engine.load().num_accepted_tokens > 0
    assert exact(drafted) == exact(plain)


def test_latents_come_back_from_host_memory(folder: Path) -> None:
    asked = prompts(16)
    scored = greedy(8, num_logprobs=1)
    with closing(ranks(folder)) as two:
        expected = exact(two.answer(asked, scored))
    with closing(ranks(folder, num_blocks=40, kv_swap_memory=64 << 20)) as two:
        two.answer(asked, scored)
        found = [two.answer([prompt], scored)[0] for prompt in asked]
        load = two.engine.load()
    assert load.hits_by_tier["host"] > 0
    assert exact(found) == expected
