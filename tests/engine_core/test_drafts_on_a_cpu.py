"""Drafted tokens change nothing but the number of steps: the CPU's executor verifies whatever a
drafter proposes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.oracle_speculator import SAMPLINGS, OracleSpeculator, answers_of_a_new_engine
from tests.engine_core.small_models import SmallEngine, convert, random_checkpoint
from tests.long_values import long_but

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 512, n).tolist() for n in (1, 5, 16, 31, 40, 100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts")
    random_checkpoint("qwen3", path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[SmallEngine]:
    engine = SmallEngine(folder, max_draft_tokens=5)
    yield engine
    engine.close()


@pytest.mark.parametrize("kind", long_but(SAMPLINGS, "penalties", "log probabilities", "a stop"))
def test_answers_and_log_probabilities_are_those_without_drafts(
    small: SmallEngine, kind: str
) -> None:
    samplings = [SamplingParams(max_tokens=n, **SAMPLINGS[kind]) for n in (24, 23, 1, 30, 17, 2)]
    plain, _ = answers_of_a_new_engine(small, PROMPTS, samplings)
    for wrong in (0.0, 0.4, 1.0):
        oracle = OracleSpeculator(plain, wrong).beside(small.config)
        answers, load = answers_of_a_new_engine(small, PROMPTS, samplings, oracle)
        assert answers == plain, wrong
        assert (load.num_accepted_tokens > 0) == (wrong < 1.0)
        assert load.num_draft_tokens > 0


def test_drafts_of_a_crowded_engine_change_nothing(small: SmallEngine, folder: Path) -> None:
    """Too few blocks for all: requests are preempted between draft and verification."""
    samplings = [SamplingParams(max_tokens=60, **SAMPLINGS["seeded"])]
    plain, _ = answers_of_a_new_engine(small, PROMPTS, samplings)
    few = {"num_blocks": 16, "max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    narrow = SmallEngine(folder, **few, max_draft_tokens=5)
    oracle = OracleSpeculator(plain, 0.3).beside(narrow.config)
    crowded, load = answers_of_a_new_engine(narrow, PROMPTS, samplings, oracle)
    narrow.close()
    assert [answer.token_ids for answer in crowded] == [answer.token_ids for answer in plain]
    assert load.num_preemptions > 0
    assert load.num_accepted_tokens > 0
