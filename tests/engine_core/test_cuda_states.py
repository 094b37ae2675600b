"""Models whose layers keep states on a GPU: an answer has the bits of a whole prompt, however the
sequence came in."""

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
)

pytestmark = pytest.mark.gpu

SIZES = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3.5-moe": SIZES,
    "granite4-hybrid": {},
    "nemotron-h": {},
    "falcon-h1 with norms": {},
    "lfm2": {"hidden_size": 512},
    "lfm2-moe": {},
}
FP8_FAMILIES = ("qwen3.5-moe", "nemotron-h", "lfm2")
"""Heads of the others are too small for an fp8 cache."""
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=FAMILIES)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Any]:
    """A model in bfloat16, the same in float32, and transformers' model."""
    base = tmp_path_factory.mktemp("states")
    model = random_checkpoint(request.param, base / "source", **FAMILIES[request.param])
    half, full = (
        convert(base / "source", base / dtype, dtype) for dtype in ("bfloat16", "float32")
    )
    return half, full, model


def engine(folder: Path, **options: Any) -> SmallEngine:
    roomy = {
        "device": "cuda",
        "block_size": 64,
        "num_blocks": 2000,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
    }
    return SmallEngine(folder, **roomy | options)


def prompts(count: int) -> list[list[int]]:
    torch.manual_seed(2)
    lens = [(1, 63, 64, 65, 127, 129, 300, 700)[i % 8] + i // 8 for i in range(count)]
    return [torch.randint(3, 500, (n,)).tolist() for n in lens]


def exact(given: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(each.token_ids, [entry.logprob for entry in each.logprobs]) for each in given]


@pytest.mark.parametrize("folders", ["qwen3.5-moe"], indirect=True)
def test_greedy_tokens_are_those_of_transformers(folders: tuple[Path, Path, Any]) -> None:
    _, folder, model = folders
    with closing(engine(folder)) as one:
        answers = one.answer(prompts(8), greedy(8))
    for prompt, answer in zip(prompts(8), answers, strict=True):
        assert answer.token_ids == reference_greedy(model, prompt, 8)


@pytest.mark.parametrize(
    ("folders", "kv_cache_dtype"),
    [*((each, "auto") for each in FAMILIES), *((each, "fp8") for each in FP8_FAMILIES)],
    indirect=["folders"],
)
def test_chunks_company_hits_and_preemption_change_no_bit(
    folders: tuple[Path, Path, Any], kv_cache_dtype: str
) -> None:
    folder = folders[0]
    asked = prompts(24)
    kind = {"kv_cache_dtype": kv_cache_dtype}
    # Smaller pages: a state set has more of them.
    num_blocks = 500 if kv_cache_dtype == "fp8" else 300
    seeded = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=NUM_TOKENS, num_logprobs=1)
        for i in range(len(asked))
    ]
    with closing(engine(folder, **kind)) as one:
        together = exact(one.answer(asked, *seeded))
        again = one.answer(asked, *seeded)
        assert exact(again) == together
        assert again[7].cached_tokens >= 640
    with closing(engine(folder, **kind)) as one:
        # Bytes of states may be no numbers in the dtype of keys and values.
        memory = one.executor.kv_caches[0].untyped_storage()
        torch.tensor([], dtype=torch.uint8, device="cuda").set_(memory).fill_(0xFF)
        assert exact(one.answer(asked, *seeded)) == together
    with closing(engine(folder, max_num_batched_tokens=200, async_depth=4, **kind)) as one:
        assert exact(one.answer(asked, *seeded)) == together
    with closing(engine(folder, num_blocks=num_blocks, **kind)) as one:
        assert exact(one.answer(asked, *seeded)) == together
    with closing(engine(folder, **kind)) as one:
        for prompt, sampling, expected in list(zip(asked, seeded, together, strict=True))[::5]:
            assert exact(one.answer([prompt], sampling)) == [expected]


def test_drafts_change_no_token(folders: tuple[Path, Path, Any]) -> None:
    folder = folders[0]
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
