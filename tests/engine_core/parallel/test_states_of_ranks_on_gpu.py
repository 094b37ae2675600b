"""Models whose layers keep states on two GPUs, or by turns on one, each with the states of its
heads: answers are likely, and have the bits of a whole prompt, however a sequence came in."""

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
from tests.engine_core.parallel.test_states_in_stages import LAYERS
from tests.engine_core.parallel.test_states_on_ranks import HEADS
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.engine_core.test_cuda_engine import behind_the_likeliest
from tests.engine_core.test_cuda_states import SIZES, engine, exact, prompts

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, dict[str, Any]] = {
    # Both ranks have the KV head.
    "qwen3.5-moe": SIZES | {"num_key_value_heads": 1},
    "nemotron-h": {},
    "granite4-hybrid without experts": {},
    "falcon-h1": {},
    "lfm2": {"hidden_size": 512},
}
"""Fields of each family's config."""
SCORED = greedy(24, num_logprobs=1)


@pytest.fixture(autouse=True)
def _sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    share_unless(2, monkeypatch)


def ranks(folder: Path, **options: Any) -> SmallEngine:
    return engine(folder, **{"tensor_parallel_size": 2} | options)


@pytest.mark.parametrize("family", ["qwen3.5-moe", "nemotron-h", "lfm2"])
def test_answers_follow_the_likeliest_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_checkpoint(family, tmp_path / "hf", **FAMILIES[family]).cuda()
    asked = prompts(8)
    with closing(ranks(convert(tmp_path / "hf", tmp_path / "ours"))) as two:
        answers = two.tokens(asked, greedy(12))
    far = torch.cat(
        [behind_the_likeliest(model, *each) for each in zip(asked, answers, strict=True)]
    )
    assert far.max() < 0.3
    assert (far == 0).double().mean() > 0.85


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_company_hits_and_preemption_change_no_bit(family: str, tmp_path: Path) -> None:
    random_checkpoint(family, tmp_path / "hf", **FAMILIES[family])
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
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
        few = 34 + 12 * two.config.state_pages
    small = {"max_num_batched_tokens": 200, "async_depth": 4, "num_blocks": few}
    with closing(ranks(folder, **small)) as two:
        assert exact(two.answer(asked, *seeded)) == together


def test_drafts_beside_whole_experts_change_no_bit(tmp_path: Path) -> None:
    random_checkpoint("qwen3.5-moe", tmp_path / "hf", **SIZES)
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
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


@pytest.mark.parametrize("family", ["qwen3.5-moe", "lfm2"])
def test_two_stages_answer_with_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    random_checkpoint(family, tmp_path / "hf", **FAMILIES[family] | LAYERS[family])
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    asked = prompts(8)
    with closing(engine(folder)) as one:
        expected = exact(one.answer(asked, SCORED))
    with closing(engine(folder, pipeline_parallel_size=2, max_num_batched_tokens=200)) as two:
        for _ in range(2):
            assert exact(two.answer(asked, SCORED)) == expected


@pytest.mark.parametrize("family", HEADS)
def test_tree_numerics_give_one_and_two_ranks_the_same_bits(family: str, tmp_path: Path) -> None:
    random_checkpoint(family, tmp_path / "hf", **FAMILIES.get(family, {}) | HEADS[family])
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    asked = prompts(8)
    with closing(engine(folder, numerics="tree")) as one:
        expected = exact(one.answer(asked, SCORED))
    with closing(ranks(folder, numerics="tree")) as two:
        assert exact(two.answer(asked, SCORED)) == expected
