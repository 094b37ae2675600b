"""Random loads of requests by seed: what is asked of an engine, and when.

A load knows nothing of executors. The same seed gives the same load for every executor, so that
answers can be compared between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling.pooling import POOLINGS
from headwater.engine_core.sampling_params import SamplingParams

VOCAB_SIZE = 512
MAX_MODEL_LEN = 128
MAX_NUM_SEQS = 8
SPARE_ROWS = 2
MOST_BATCHED_TOKENS = 100
MOST_SPARE_BLOCKS = 24
"""KV blocks beside those of one request of the largest length."""
MAX_DRAFTS = 5
EOS = 2
FIRST_TOKEN = 3
MANY = 1 << 30
NEVER = 1 << 30
Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that are added together, the steps after them, and what is done then. Requests are
    named by any number, taken modulo those added so far."""

    adds: list[NewRequest]
    num_steps: int
    cancels: list[int]
    credits: list[tuple[int, int]]
    stalls: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The rounds of one seed, with the limits of its engine."""

    seed: int
    rounds: list[Round]
    limits: dict[str, Any]
    """Fields of `EngineConfig`, none larger than those of the executor."""
    late_polls: int
    """The most polls after which a plan is reported as done; `NEVER`: only when it is awaited."""
    mask_delay: int
    """The most steps that a mask takes."""

    @property
    def requests(self) -> list[NewRequest]:
        return [new for each in self.rounds for new in each.adds]

    def config(self, executor: EngineConfig) -> EngineConfig:
        """The limits of this load, within those of an executor."""
        limits = dict(self.limits)
        if "num_blocks" in limits:
            # A block of all layers has a page in each group.
            limits["num_blocks"] *= executor.num_page_groups
        limits["async_depth"] = max(limits["async_depth"], executor.num_groups)
        limits["num_host_blocks"] = min(limits["num_host_blocks"], executor.num_host_blocks)
        return replace(executor, **limits)


class Lot:
    """Draws of one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def one_of(self, choices: Sequence[Choice]) -> Choice:
        return choices[int(self._rng.integers(len(choices)))]

    def upto(self, most: int, least: int = 0) -> int:
        return int(self._rng.integers(least, most + 1))

    def has(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def tokens(self, count: int) -> list[int]:
        drawn: list[int] = self._rng.integers(FIRST_TOKEN, VOCAB_SIZE, count).tolist()
        return drawn


def random_load(seed: int, num_rounds: int = 4) -> Load:
    """Rounds of one to six requests each."""
    lot = Lot(seed)
    leads = [lot.tokens(90) for _ in range(2)]
    max_num_seqs = lot.upto(MAX_NUM_SEQS, 2)
    limits: dict[str, Any] = {
        "num_blocks": 1 + MAX_MODEL_LEN // 16 + lot.one_of([0, 0, 2, 5, MOST_SPARE_BLOCKS]),
        "num_host_blocks": lot.one_of([0, 12, 20]),
        "max_num_seqs": max_num_seqs,
        "spare_rows": lot.upto(SPARE_ROWS),
        "max_num_batched_tokens": lot.upto(MOST_BATCHED_TOKENS, 2 * max_num_seqs),
        "long_prefill_chunk": lot.one_of([0, 0, 7, 16, 40]),
        "async_depth": lot.upto(4, 1),
        "enable_prefix_caching": lot.has(0.8),
        "policy": lot.one_of(["fcfs", "fair"]),
    }
    rounds: list[Round] = []
    num_added = 0
    for _ in range(num_rounds):
        adds = _adds(lot, leads, num_added)
        num_added += len(adds)
        rounds.append(
            Round(
                adds=adds,
                num_steps=lot.upto(12),
                cancels=[lot.upto(100) for _ in range(lot.upto(2))],
                credits=[(lot.upto(100), lot.upto(9, 1)) for _ in range(lot.upto(3))],
                stalls=[lot.upto(100) for _ in range(lot.upto(4))],
            )
        )
    return Load(
        seed=seed,
        rounds=rounds,
        limits=limits,
        late_polls=lot.one_of([0, 3, NEVER]),
        mask_delay=lot.one_of([0, 1, 4]),
    )


def allowed(answer: Sequence[int]) -> Int32Array:
    """The mask int32 [words] of every grammar here behind an answer. At two of seven places one
    token is allowed, elsewhere four of five; the end of the sequence now and then."""
    if len(answer) % 7 < 2:
        is_allowed = np.zeros(VOCAB_SIZE, np.bool_)
        is_allowed[_forced(answer)] = True
    else:
        ids = np.arange(VOCAB_SIZE)
        is_allowed = (ids * 7 + len(answer) * 3 + sum(answer[-2:])) % 5 != 0
        is_allowed[EOS] = len(answer) % 9 == 4
    mask: Int32Array = np.packbits(is_allowed, bitorder="little").view(np.int32)
    return mask


def forced_behind(answer: Sequence[int]) -> list[int]:
    """Tokens that the grammar forces behind an answer."""
    forced: list[int] = []
    while (len(answer) + len(forced)) % 7 < 2:
        forced.append(_forced([*answer, *forced]))
    return forced


def _forced(answer: Sequence[int]) -> int:
    return FIRST_TOKEN + (11 * len(answer) + sum(answer[-2:])) % (VOCAB_SIZE - FIRST_TOKEN)


def _adds(lot: Lot, leads: list[list[int]], num_added: int) -> list[NewRequest]:
    adds: list[NewRequest] = []
    for _ in range(lot.upto(4, 1)):
        new = _request(lot, leads)
        adds.append(replace(new, key=num_added + len(adds)))
        if new.forks:
            fork = replace(new, key=num_added + len(adds), choice_index=2, output_ids=[])
            adds.append(fork)
    return adds


def _request(lot: Lot, leads: list[list[int]]) -> NewRequest:
    lead = lot.one_of(leads)[: lot.upto(90, 20)] if lot.has(0.7) else []
    prompt_ids = [*lead, *lot.tokens(lot.upto(12, 1))]
    sampling = _pooled(lot) if lot.has(0.1) else _sampling(lot)
    has_grammar = not sampling.pooling and lot.has(0.25)
    if has_grammar:
        # A grammar may force any token.
        sampling = replace(
            sampling, allowed_token_ids=(), bad_words=(), min_tokens_blocked_ids=(), min_tokens=0
        )
    has_begun = not sampling.pooling and not has_grammar and lot.has(0.15)
    return NewRequest(
        key=0,
        prompt_ids=prompt_ids,
        output_ids=[FIRST_TOKEN + 40 + i for i in range(lot.upto(9, 1))] if has_begun else [],
        sampling=sampling,
        choice_index=lot.upto(1),
        has_grammar=has_grammar,
        namespace=lot.one_of([b"a" * 16, b"a" * 16, b"b" * 16]),
        credit=lot.one_of([MANY, MANY, MANY, 0, 1, 7]),
        tier=lot.upto(1, -1),
        virtual_time=lot.one_of([0.0, 1.5]),
        tenant=lot.one_of(["", "", "a", "b"]),
        weight=lot.one_of([0.5, 1.0, 3.0]),
        forks=not sampling.pooling and lot.has(0.15),
    )


def _pooled(lot: Lot) -> SamplingParams:
    return SamplingParams(max_tokens=0, pooling=lot.one_of(list(POOLINGS)))


def _sampling(lot: Lot) -> SamplingParams:
    """Drafts are more often right where few tokens are allowed."""
    stop_token_ids = lot.one_of([(EOS,), (EOS, 5), (), tuple(range(30, 43))])
    return SamplingParams(
        temperature=lot.one_of([0.0, 0.5, 1.0]),
        seed=lot.upto(3),
        max_tokens=lot.one_of([1, 2, 9, 17, 30]),
        min_tokens=lot.one_of([0, 0, 5]),
        stop_token_ids=stop_token_ids,
        min_tokens_blocked_ids=lot.one_of([(), stop_token_ids]),
        num_logprobs=lot.one_of([None, 0, 3]),
        num_prompt_logprobs=lot.one_of([None, None, None, 2]),
        **lot.one_of(_EDITS),
        **lot.one_of(_FILTERS),
    )


_EDITS: list[dict[str, Any]] = [
    {},
    {},
    {"allowed_token_ids": (50, 51, 52)},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"bad_words": ((9,), (10, 11))},
    {"logit_bias": {7: 3.0, 8: -4.0}},
]
_FILTERS: list[dict[str, Any]] = [{}, {}, {"top_k": 20}, {"top_p": 0.8, "min_p": 0.02}]
