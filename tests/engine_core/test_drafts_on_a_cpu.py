"""Drafted tokens change nothing but the number of steps: the CPU's executor verifies whatever a drafter proposes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.masks import Rows
from headwater.engine_core.scheduling.request_table import RequestTable
from tests.engine_core.fixed_speculator import FixedSpeculator
from tests.engine_core.small_models import Answer, SmallEngine, convert, random_checkpoint

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 512, n).tolist() for n in (1, 5, 16, 31, 40, 100)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "filtered": {"temperature": 1.1, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "bias and bad words": {
        "temperature": 0.8,
        "seed": 2,
        "logit_bias": {5: 3.0, 6: -4.0},
        "bad_words": ((9,), (10, 11)),
        "min_tokens": 6,
        "min_tokens_blocked_ids": (2,),
    },
    "log probabilities": {"temperature": 0.7, "seed": 4, "num_logprobs": 3},
    "a stop": {"temperature": 1.0, "seed": 5, "stop_token_ids": tuple(range(3, 40))},
}


class Oracle(FixedSpeculator):
    """Knows the answers, and spoils a share of what it proposes."""

    def __init__(self, answers: dict[int, list[int]], wrong: float) -> None:
        super().__init__(max_drafts=5)
        self.num_proposed = 0
        self._answers, self._wrong, self._rng = answers, wrong, np.random.default_rng(0)

    def draft(self, table: RequestTable, rows: Rows, most: Int32Array, total: int) -> tuple[Int32Array, Int32Array]:
        num_drafts, draft_ids = np.zeros(len(rows), np.int32), np.zeros((len(rows), self.max_drafts), np.int32)
        for i, row in enumerate(rows.tolist()):
            request = table.requests[row]
            assert request is not None
            at = int(table.num_known[row]) - request.num_prompt_tokens
            right = self._answers[request.key][at : at + int(most[i])]
            ids = [t if self._rng.random() >= self._wrong else int(self._rng.integers(3, 512)) for t in right]
            num_drafts[i] = len(ids)
            draft_ids[i, : len(ids)] = ids
        self.num_proposed += int(num_drafts.sum())
        return num_drafts, draft_ids


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


def answers(small: SmallEngine, samplings: Sequence[SamplingParams], speculator: Oracle | None) -> list[Answer]:
    """Those of a new engine, whose requests begin with key 0, on the executor of `small`."""
    fresh = copy.copy(small)
    beside = None if speculator is None else speculator.beside(small.config)
    fresh.engine, fresh._num_asked = Engine(small.config, small.executor, speculator=beside), 0
    return fresh.answer(PROMPTS, *samplings)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_answers_and_log_probabilities_are_those_without_drafts(small: SmallEngine, kind: str) -> None:
    samplings = [SamplingParams(max_tokens=n, **SAMPLINGS[kind]) for n in (24, 23, 1, 30, 17, 2)]
    plain = answers(small, samplings, None)
    for wrong in (0.0, 0.4, 1.0):
        oracle = Oracle({i: answer.token_ids for i, answer in enumerate(plain)}, wrong)
        assert answers(small, samplings, oracle) == plain, wrong
        assert oracle.num_proposed


def test_drafts_of_a_crowded_engine_change_nothing(small: SmallEngine, folder: Path) -> None:
    """Too few blocks for all: requests are preempted between draft and verification."""
    samplings = [SamplingParams(max_tokens=60, **SAMPLINGS["seeded"])]
    plain = answers(small, samplings, None)
    oracle = Oracle({i: answer.token_ids for i, answer in enumerate(plain)}, 0.3)
    few = {"num_blocks": 16, "max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    narrow = SmallEngine(folder, **few, max_draft_tokens=5)
    crowded = answers(narrow, samplings, oracle)
    narrow.close()
    assert [answer.token_ids for answer in crowded] == [answer.token_ids for answer in plain]
    assert oracle.num_proposed
