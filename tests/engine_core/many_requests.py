"""Many requests of all kinds, told by an engine that speculates and by one that does not: the same
to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwater.engine_core.drafting.ngram import NGramProposer
from headwater.engine_core.drafting.proposer import Proposer
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.drafting.suffix import SuffixProposer
from headwater.engine_core.engine import Engine
from headwater.engine_core.request import NewRequest, Speculation, TokenLogprobs
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator
from headwater.engine_core.scheduling.speculation.model_speculator import NAME, ModelSpeculator
from headwater.engine_core.step_output import EngineLoad
from tests.engine_core.oracle_speculator import VOCAB_SIZE
from tests.engine_core.small_models import SmallEngine

COSTS = StepCosts.measured([1, 64], [1.0, 1.0], gap=0.05)
PENALTIES: list[dict[str, Any]] = [
    {},
    {},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "bad_words": ((9,),)},
]
FILTERS: list[dict[str, Any]] = [{}, {}, {"top_k": 20}, {"top_p": 0.8, "min_p": 0.02}]
WISHES = [
    Speculation(),
    Speculation(),
    Speculation(max_tokens=2),
    Speculation(drafter="ngram"),
    Speculation(is_on=False),
]


@dataclass
class Told:
    """What one request was told."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


def requests(rng: np.random.Generator, count: int, *, edits: bool) -> list[NewRequest]:
    """Some have a prefix in common; some are choices of one prompt. With `edits` logits of some are
    edited, and log probabilities wanted."""
    leads = rng.integers(3, VOCAB_SIZE, (3, 40)).tolist()
    drawn: list[NewRequest] = []
    for key in range(count):
        lead = leads[rng.integers(3)][: rng.integers(0, 41)] if rng.random() < 0.6 else []
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.5, 1.0])),
            seed=int(rng.integers(4)),
            max_tokens=int(rng.integers(1, 60)),
            stop_token_ids=tuple(range(3, 11)) if rng.random() < 0.3 else (),
            num_logprobs=int(rng.integers(4)) if edits and rng.random() < 0.3 else None,
            **PENALTIES[rng.integers(4) if edits else 0],
            **FILTERS[rng.integers(4)],
        )
        new = NewRequest(
            key=key,
            prompt_ids=[*lead, *rng.integers(3, VOCAB_SIZE, rng.integers(1, 30)).tolist()],
            output_ids=[],
            sampling=sampling,
            choice_index=int(rng.integers(3)),
            speculation=WISHES[rng.integers(len(WISHES))],
        )
        drawn.append(
            replace(drawn[-1], key=key, choice_index=3) if drawn and rng.random() < 0.1 else new
        )
    return drawn


def tell(engine: Engine, asked: Sequence[NewRequest]) -> list[Told]:
    reported = {new.key: Told(list(new.output_ids), []) for new in asked}
    for new in asked:
        engine.add(new)
    while engine.has_work():
        if (output := engine.step()) is None:
            continue
        at = 0
        for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
            reported[key].token_ids += output.token_ids[at : at + num_tokens]
            reported[key].logprobs += [
                output.logprobs[i] for i in range(at, at + num_tokens) if i in output.logprobs
            ]
            at += num_tokens
    assert engine.load().num_used_blocks == 0
    return list(reported.values())


def check_equality(
    roomy: SmallEngine,
    crowded: SmallEngine,
    count: int,
    *,
    has_draft_model: bool = False,
    name: str = NAME,
) -> EngineLoad:
    """Without speculation and with room for all, then with it and few blocks: as they are, then
    again, when suffixes of the answers are known, some in the middle of their answer. `name`: of
    what drafts in the executor."""
    speculator = (
        _with_draft_model(crowded, name) if has_draft_model else _without_draft_model(crowded)
    )
    # New ones on each executor: what an engine has cached is gone once another one has written the
    # same blocks.
    plain = Engine(roomy.config, roomy.executor)
    drafting = Engine(crowded.config, crowded.executor, speculator=speculator)
    rng = np.random.default_rng(11)
    first_key = 0
    for size in [min(100, count - done) for done in range(0, count, 100)]:
        asked = [
            replace(new, key=first_key + new.key)
            for new in requests(rng, size, edits=rng.random() < 0.5)
        ]
        expected = tell(plain, asked)
        assert tell(drafting, asked) == expected
        again = []
        for new, right in zip(asked, expected, strict=True):
            known = int(rng.integers(len(right.token_ids))) if rng.random() < 0.3 else 0
            again.append(replace(new, key=new.key + size, output_ids=right.token_ids[:known]))
        for new, reported, right in zip(again, tell(drafting, again), expected, strict=True):
            assert reported.token_ids == right.token_ids, new
            assert reported.logprobs == right.logprobs[len(new.output_ids) :], new
        first_key += 2 * size
    return drafting.load()


def _without_draft_model(small: SmallEngine) -> AdaptiveSpeculator:
    ahead = NGramProposer.name if small.executor.can_draft else ""
    return AdaptiveSpeculator(_drafters(small), COSTS, **_sizes(small), executor_drafts=ahead)


def _with_draft_model(small: SmallEngine, name: str) -> ModelSpeculator:
    return ModelSpeculator(
        _drafters(small), COSTS, StepCosts.measured([1], [0.05]), **_sizes(small), name=name
    )


def _drafters(small: SmallEngine) -> list[Proposer]:
    num_rows = small.config.num_rows
    max_drafts = small.config.max_draft_tokens
    return [
        NGramProposer(num_rows, small.config.max_model_len, max_drafts),
        SuffixProposer(num_rows, max_drafts),
    ]


def _sizes(small: SmallEngine) -> dict[str, int]:
    config = small.config
    return {
        "num_rows": config.num_rows,
        "max_drafts": config.max_draft_tokens,
        "vocab_size": VOCAB_SIZE,
    }
