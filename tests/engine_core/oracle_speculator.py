"""A speculator that knows the answers and spoils a share of what it proposes, and the samplings
that it is held to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.speculator import Speculator
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_table import RequestTable
from headwater.engine_core.step_output import EngineLoad
from tests.engine_core.fixed_speculator import FixedSpeculator
from tests.engine_core.small_models import SHAPE, Answer, SmallEngine

VOCAB_SIZE = SHAPE["vocab_size"]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "filtered": {"temperature": 1.1, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8,
        "seed": 1,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
    },
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


class OracleSpeculator(FixedSpeculator):
    """Proposes as many tokens as it may; each is another than the answer's with probability
    `wrong`."""

    def __init__(self, answers: Sequence[Answer], wrong: float, max_drafts: int = 5) -> None:
        """answers[i]: that of the request with key i; those behind the last begin with the first
        again."""
        super().__init__(max_drafts)
        self._answers = answers
        self._wrong = wrong
        self._rng = np.random.default_rng(0)

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array]:
        num_drafts = np.zeros(len(rows), np.int32)
        draft_ids = np.zeros((len(rows), self.max_drafts), np.int32)
        for i, row in enumerate(rows.tolist()):
            request = table.requests[row]
            assert request is not None
            at = int(table.num_known[row]) - request.num_prompt_tokens
            right = self._answers[request.key % len(self._answers)].token_ids[
                at : at + int(most[i])
            ]
            ids = [(t + 1) % VOCAB_SIZE if self._rng.random() < self._wrong else t for t in right]
            num_drafts[i] = len(ids)
            draft_ids[i, : len(ids)] = ids
        return num_drafts, draft_ids


def new_engine(small: SmallEngine, speculator: Speculator | None = None) -> SmallEngine:
    """One on the executor of `small`: keys begin with 0, and its cache is empty."""
    fresh = copy.copy(small)
    fresh.engine = Engine(small.config, small.executor, speculator=speculator)
    fresh._num_asked = 0
    return fresh


def answers_of_a_new_engine(
    small: SmallEngine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    speculator: Speculator | None = None,
    *,
    num_rounds: int = 1,
) -> tuple[list[Answer], EngineLoad]:
    """Those to the prompts asked at once, so many times one after another."""
    fresh = new_engine(small, speculator)
    answers = [answer for _ in range(num_rounds) for answer in fresh.answer(prompts, *samplings)]
    load = fresh.engine.load()
    assert load.num_used_blocks == 0, "a request left blocks behind"
    return answers, load
